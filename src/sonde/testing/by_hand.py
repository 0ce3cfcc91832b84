"""A small manual training loop without sonde, as a reference for trainers with sonde."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, Dataset

BATCH: Final = 4
FAILS_AT: Final = 3
"""The forward pass, counted from 0, in which a net with an `error` fails."""
Gradients = Mapping[str, NDArray[Any]]


class Net(nn.Module):
    """Two layers that return (loss, output), as trainers expect, and remember every training loss.

    `error` is raised in the fourth forward pass, to test a training that fails.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2
        self.error = error
        self.losses: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.error is not None and len(self.losses) == FAILS_AT:
            raise self.error
        out = self.second(torch.tanh(self.first(x)))
        loss = nn.functional.mse_loss(out.float(), y)
        if self.training:
            self.losses.append(loss.item())
        return loss, out


class Rows(Dataset[dict[str, Tensor]]):
    """{"x": …, "y": …}, always the same. Read in order, `BATCH` at a time."""

    def __init__(self, num_batches: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(num_batches * BATCH, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"x": self.x[row], "y": self.x[row].sum()[None]}

    def loader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self, batch_size=BATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings of the small training. A trainer under test follows them: AdamW, batches in order, no schedule."""

    num_steps: int = 6
    lr: float = 0.01
    clip: float = 1.0
    """The norm of all gradients is clipped to this before the optimizer steps."""
    accumulate: int = 1
    """Micro-batches of one step; their mean loss is minimised."""
    is_bf16: bool = False
    """Whether the forward pass runs under autocast to bfloat16."""

    def rows(self) -> Rows:
        return Rows(self.num_steps * self.accumulate)

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=self.lr, weight_decay=0.0)

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.is_bf16)

    def losses(self, of_batches: list[float]) -> list[float]:
        """One value per step, from those of each micro-batch."""
        return [float(loss) for loss in np.reshape(of_batches, (-1, self.accumulate)).mean(1)]


def train_by_hand(recipe: Recipe) -> tuple[list[float], list[Gradients]]:
    """The loss of every step, and the gradients as the optimizer used them, by parameter name."""
    losses, steps = _train(recipe)
    return losses, [used for _, used in steps]


def norms_before_clipping(recipe: Recipe) -> list[dict[str, float]]:
    """The norm of every gradient before clipping, step by step, by parameter name."""
    return [{name: float(np.linalg.norm(grad)) for name, grad in raw.items()} for raw, _ in _train(recipe)[1]]


def _train(recipe: Recipe) -> tuple[list[float], list[tuple[Gradients, Gradients]]]:
    """The losses, and the gradients before and after clipping."""
    net = Net()
    optimizer = recipe.optimizer(net)
    batches = iter(recipe.rows().loader())
    gradients = []
    for _ in range(recipe.num_steps):
        optimizer.zero_grad()
        for _ in range(recipe.accumulate):
            with recipe.autocast():
                loss, _ = net(**next(batches))
            (loss / recipe.accumulate).backward()
        raw = gradients_of(net)
        nn.utils.clip_grad_norm_(net.parameters(), recipe.clip)
        gradients.append((raw, gradients_of(net)))
        optimizer.step()
    return recipe.losses(net.losses), gradients


def gradients_of(net: nn.Module) -> Gradients:
    """A copy of the current gradients."""
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {name: grad.detach().double().numpy().copy() for name, grad in found.items() if grad is not None}


def hooks_on(net: nn.Module) -> dict[str, Any]:
    """Every hook in torch, and on the net, by which training can be observed. Must be the same before and after."""
    places = {name: vars(torch_module)[name] for name in vars(torch_module) if name.startswith("_global_")}
    places |= {name: vars(torch_optimizer)[name] for name in vars(torch_optimizer) if name.startswith("_global_")}
    for name, module in net.named_modules():
        places |= {f"{name}.{key}": value for key, value in vars(module).items() if "hook" in key}
    found = {name: list(value) for name, value in places.items() if isinstance(value, dict) and value}
    clip = nn.utils.clip_grad
    return found | {
        "clipping": (clip.clip_grad_norm_, clip._clip_grads_with_norm_, clip.clip_grad_value_),
        "scaling": torch.amp.GradScaler.step,
    }


def digest(value: Any) -> str:
    """A hash of every bit."""
    sha = hashlib.sha256()
    _feed(sha, value)
    return sha.hexdigest()


def _feed(sha: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        sha.update(str((value.dtype, tuple(value.shape))).encode())
        sha.update(
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        )
    elif isinstance(value, dict):
        for key in value:
            sha.update(str(key).encode())
            _feed(sha, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(sha, item)
    else:
        sha.update(repr(value).encode())
