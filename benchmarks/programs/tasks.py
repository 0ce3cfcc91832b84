"""The tasks of the generated programs: data made here, a loss, and a score between chance (0) and perfect (1).

The score is the benchmark's own measure of success. It is taken after training, on held-out data, and is never logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

FEATURES: Final = 16
CLASSES: Final = 6
VOCABULARY: Final = 20
LENGTH: Final = 16
SIDE: Final = 8
IGNORED: Final = -100


@dataclass
class Data:
    """Training data and held-out data."""

    x: Any
    y: Any
    x_val: Any
    y_val: Any


@dataclass(frozen=True)
class Task:
    """A task: its data, its loss, and how well an output does."""

    name: str
    make: Callable[[torch.Generator, int], tuple[Any, Any]]
    """Draws a number of samples."""
    outputs: int
    loss: Callable[[], nn.Module]
    score: Callable[[Any, Any], float]
    inputs: str
    """The kind of input: vector, image, tokens, series, ids, pair."""
    num: int = 800
    batch: int = 32
    is_class: bool = False
    """Whether the target is a class index."""

    def data(self, seed: int) -> Data:
        g = torch.Generator().manual_seed(500 + seed)
        x, y = self.make(g, self.num + 256)
        return Data(x[: self.num], y[: self.num], x[self.num :], y[self.num :])


TASKS: Final[dict[str, Task]] = {}


def _task(name: str, make: Any, outputs: int, loss: Any, score: Any, inputs: str, **options: Any) -> None:
    TASKS[name] = Task(name, make, outputs, loss, score, inputs, **options)


# ------------------------------------------------------------------------------------------------------------- scores


def _accuracy(output: Tensor, y: Tensor) -> float:
    """Accuracy of the largest logit, rescaled so that always naming the most frequent class gives 0."""
    output, y = output.reshape(-1, output.shape[-1]), y.reshape(-1)
    kept = y != IGNORED
    output, y = output[kept], y[kept]
    chance = y.bincount().max().item() / len(y)
    return ((output.argmax(-1) == y).float().mean().item() - chance) / (1 - chance)


def _balanced(output: Tensor, y: Tensor) -> float:
    """Mean of the accuracies of both classes, rescaled so that a constant answer gives 0."""
    guess, y = output.reshape(-1) > 0, y.reshape(-1) > 0.5
    rates = [(guess[y == side] == side).float().mean().item() for side in (False, True) if (y == side).any()]
    return 2 * sum(rates) / len(rates) - 1


def _explained(output: Any, y: Tensor) -> float:
    """The fraction of the variance that is explained."""
    output = output[0] if isinstance(output, tuple) else output
    y = y.reshape(output.shape).float()
    mean = y.mean(0)
    return 1 - ((output - y).square().mean() / (y - mean).square().mean()).item()


def _likelihood(output: Tensor, y: Tensor) -> float:
    """The fraction of the entropy of single tokens that is predicted."""
    y = y.reshape(-1)
    kept = y != IGNORED
    share = y[kept].bincount(minlength=output.shape[-1]).clamp(min=1) / kept.sum()
    single = -(share * share.log()).sum().item()
    return 1 - functional.cross_entropy(output.reshape(-1, output.shape[-1])[kept], y[kept]).item() / single


# -------------------------------------------------------------------------------------------------------------- losses


class TokenLoss(nn.Module):
    """Cross entropy over all positions; -100 is not scored."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output.reshape(-1, output.shape[-1]), y.reshape(-1), ignore_index=IGNORED)


class EvidenceBound(nn.Module):
    """Reconstruction plus the divergence of a Gaussian code from the standard normal."""

    def forward(self, output: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
        restored, mean, log_var = output
        divergence = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1).mean()
        return functional.mse_loss(restored, y) + 0.01 * divergence


class WeightedBinary(nn.Module):
    """Binary cross entropy in which the rare class counts more."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(output, y, pos_weight=torch.tensor(5.0))


# -------------------------------------------------------------------------------------------------------------- vectors


def _fixed(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _signal(x: Tensor, outputs: int) -> Tensor:
    """A smooth, non-linear function of the inputs."""
    w = _fixed(FEATURES, 3 * outputs) / FEATURES**0.5
    h = x @ w
    return torch.sin(2 * h[:, :outputs]) + h[:, outputs : 2 * outputs] * (1.0 + 0.5 * h[:, 2 * outputs :])


def _regression(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, FEATURES, generator=g)
    y = _signal(x, 1)
    return x, (y - y.mean()) / y.std() + 0.1 * torch.randn(num, 1, generator=g)


def _binary(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, FEATURES, generator=g)
    return x, (_signal(x, 1) > 0).float()


def _multiclass(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(CLASSES, (num,), generator=g)
    x = 1.0 * _fixed(CLASSES, FEATURES)[y] + torch.randn(num, FEATURES, generator=g)
    x = x + 0.3 * (x @ _fixed(FEATURES, FEATURES, seed=2) / FEATURES**0.5) ** 2
    return (x - x.mean(0)) / x.std(0), y


def _imbalanced(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(num, FEATURES, generator=g)
    value = _signal(x, 1)
    return x, (value > value.quantile(0.85)).float()


def _manifold(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    code = torch.randn(num, 3, generator=g)
    x = torch.tanh(code @ _fixed(3, FEATURES, seed=4)) + 0.05 * torch.randn(num, FEATURES, generator=g)
    x = x / x.std()
    return x, x


def _views(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    code = torch.randn(num, 4, generator=g)
    clean = torch.tanh(code @ _fixed(4, FEATURES, seed=5))
    x = torch.stack([clean + 0.2 * torch.randn(num, FEATURES, generator=g) for _ in range(2)], 1)
    return x, torch.zeros(num, dtype=torch.long)


class InfoNCE(nn.Module):
    """Each sample's second view against those of the rest of the batch. The targets are positions in the batch."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(output, torch.arange(len(output)))


def _matched(output: Tensor, y: Tensor) -> float:
    return (output.argmax(-1) == torch.arange(len(output))).float().mean().item()


_task("regression", _regression, 1, nn.MSELoss, _explained, "vector")
_task("binary", _binary, 1, nn.BCEWithLogitsLoss, _balanced, "vector")
_task("multiclass", _multiclass, CLASSES, nn.CrossEntropyLoss, _accuracy, "vector", is_class=True)
_task("imbalanced", _imbalanced, 1, WeightedBinary, _balanced, "vector", num=1200)
_task("reconstruction", _manifold, FEATURES, nn.MSELoss, _explained, "vector")
_task("generation", _manifold, FEATURES, EvidenceBound, _explained, "vector")
_task("contrastive", _views, FEATURES, InfoNCE, _matched, "pair")


# --------------------------------------------------------------------------------------------------------------- images


def _images(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    y = torch.randint(CLASSES, (num,), generator=g)
    x = 0.5 * torch.randn(num, 1, SIDE, SIDE, generator=g)
    for i in range(num):
        place = 1 + 2 * (int(y[i]) % 3)
        x[i, 0, place] += 1.5 * float(y[i] < 3)
        x[i, 0, :, place] += 1.5 * float(y[i] >= 3)
    return (x - x.mean()) / x.std(), y


def _segments(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(num, 1, SIDE, SIDE)
    corners = torch.randint(0, SIDE - 3, (num, 2), generator=g)
    for i, (top, left) in enumerate(corners.tolist()):
        mask[i, 0, top : top + 3, left : left + 3] = 1.0
    return mask * 1.5 + 0.6 * torch.randn(num, 1, SIDE, SIDE, generator=g), mask


def _places(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x = 0.3 * torch.randn(num, 1, SIDE, SIDE, generator=g)
    places = torch.rand(num, 2, generator=g) * (SIDE - 1)
    axis = torch.arange(SIDE).float()
    blob = torch.exp(-((axis[None, :, None] - places[:, :1, None]) ** 2 + (axis - places[:, 1:, None]) ** 2) / 3)
    return x + 2 * blob[:, None], (places - places.mean(0)) / places.std(0)


_task("images", _images, CLASSES, nn.CrossEntropyLoss, _accuracy, "image", is_class=True)
_task("segmentation", _segments, 1, nn.BCEWithLogitsLoss, _balanced, "image")
_task("localisation", _places, 2, nn.MSELoss, _explained, "image")


# ------------------------------------------------------------------------------------------------------------ sequences


def _recall(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(CLASSES, VOCABULARY, (num, LENGTH // 2), generator=g)
    y = torch.randint(CLASSES, (num,), generator=g)
    x[:, 0] = y
    return x, y


def _chain() -> Tensor:
    """Transition probabilities of the source."""
    return (2.5 * _fixed(VOCABULARY, VOCABULARY, seed=6)).softmax(-1)


def _language(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    chain = _chain()
    tokens = torch.randint(VOCABULARY, (num, LENGTH + 1), generator=g)
    for t in range(1, LENGTH + 1):
        tokens[:, t] = torch.multinomial(chain[tokens[:, t - 1]], 1, generator=g)[:, 0]
    return tokens[:, :-1], tokens[:, 1:].clone()


def _tagging(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(1, VOCABULARY, (num, LENGTH), generator=g)
    y = torch.where(torch.rand(x.shape, generator=g) < 0.1, torch.randint(3, x.shape, generator=g), x % 3)
    ends = torch.randint(LENGTH // 2, LENGTH + 1, (num, 1), generator=g)
    is_padding = torch.arange(LENGTH) >= ends
    return x.masked_fill(is_padding, 0), y.masked_fill(is_padding, IGNORED)


def _series(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    rate = 0.2 + 0.8 * torch.rand(num, 1, generator=g)
    phase = 6.28 * torch.rand(num, 1, generator=g)
    values = torch.sin(rate * torch.arange(LENGTH + 1) + phase) + 0.1 * torch.randn(num, LENGTH + 1, generator=g)
    return values[:, :-1, None], values[:, -1:]


_task("recall", _recall, CLASSES, nn.CrossEntropyLoss, _accuracy, "tokens", is_class=True)
_task("language", _language, VOCABULARY, TokenLoss, _likelihood, "tokens", batch=16, is_class=True)
_task("tagging", _tagging, 3, TokenLoss, _accuracy, "tokens", batch=16, is_class=True)
_task("forecast", _series, 1, nn.MSELoss, _explained, "series")


# ---------------------------------------------------------------------------------------------------------- ids, policy


def _ratings(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x = torch.randint(40, (num, 2), generator=g)
    user, item = _fixed(40, 4, seed=8)[x[:, 0]], _fixed(40, 4, seed=9)[x[:, 1]]
    y = user[:, :1] + item[:, :1] + 0.3 * (user * item).sum(1, keepdim=True)
    return x, y / 1.5 + 0.1 * torch.randn(num, 1, generator=g)


def _clicks(g: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
    x, y = _ratings(g, num)
    return x, (y > 0).float()


class PolicyGradient(nn.Module):
    """REINFORCE with the mean reward as a baseline: the batch carries the best action, the loss draws the actions."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        chosen = torch.distributions.Categorical(logits=output.detach()).sample()
        reward = (chosen == y).float()
        log_likelihood = output.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        return -((reward - reward.mean()) * log_likelihood).mean()


_task("ratings", _ratings, 1, nn.MSELoss, _explained, "ids", num=4000)
_task("clicks", _clicks, 1, nn.BCEWithLogitsLoss, _balanced, "ids", num=4000)
_task("policy", _multiclass, CLASSES, PolicyGradient, _accuracy, "vector")
