"""Models that learn the training data by heart, models that cannot learn them, and noise that no model can learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from faults import data
from faults.program import Job, endless, program
from faults.stacks import LanguageModel, cnn, fill, he, mlp, token_loss, xavier


def _job(
    model: nn.Module, optimizer: Optimizer, split: data.Split, seed: int, steps: int = 300, *, batch: int = 50
) -> Job:
    (x, y), val = split
    is_class = y.dtype == torch.long
    loss: nn.Module = nn.CrossEntropyLoss() if is_class else nn.MSELoss()
    batches = endless(x, y, batch, seed)
    return Job(model, optimizer, loss, batches, steps, val=val, val_every=steps // 15, is_accuracy=is_class)


def _few(split: data.Split, num: int) -> data.Split:
    (x, y), val = split
    return (x[:num], y[:num]), val


def _dropping(model: nn.Sequential, p: float) -> nn.Sequential:
    """A dropout after every activation."""
    layers: list[nn.Module] = []
    for layer in model.children():
        layers += [layer, nn.Dropout(p)] if isinstance(layer, nn.ReLU | nn.GELU) else [layer]
    return nn.Sequential(*layers)


# ---------------------------------------------------------------------------------------------------------- overfitting


@program("overfit_few_noisy_rows", "overfitting", also_ok=("data_duplication",), source="SageMaker Overfit")
def _noisy_rows(seed: int, fixed: bool) -> Job:
    (x, y), val = data.clusters(1600, spread=2.0)
    if not fixed:
        x, y = x[:80], y[:80].clone()
        y[:20] = torch.randint(5, (20,), generator=torch.Generator().manual_seed(seed))
    model = fill(mlp([20, 256, 128, 5]), he)
    model = _dropping(model, 0.3) if fixed else model  # type: ignore[arg-type]
    return _job(model, Adam(model.parameters(), 1e-3 if fixed else 2e-3), ((x, y), val), seed, 300, batch=40)


@program("overfit_small_regression", "overfitting", also_ok=("data_duplication",), source="AUTOTRAINER: test turns bad")
def _small_regression(seed: int, fixed: bool) -> Job:
    (x, y), val = data.slopes(2000)
    noise = torch.randn(len(y), 1, generator=torch.Generator().manual_seed(seed))
    y = y + (0.1 if fixed else 0.7) * noise
    split = ((x, y), val) if fixed else ((x[:60], y[:60]), val)
    model = fill(mlp([6, 256, 128, 1]), he)
    return _job(model, Adam(model.parameters(), 2e-3), split, seed, 500, batch=30)


@program("overfit_conv_few_images", "overfitting", also_ok=("data_duplication",), source="AUTOTRAINER: test turns bad")
def _few_images(seed: int, fixed: bool) -> Job:
    split = data.images(1600, noise=0.8)
    split = split if fixed else _few(split, 64)
    model = fill(cnn([16, 32], 64, 8), he)
    return _job(model, Adam(model.parameters(), 1e-3 if fixed else 4e-3), split, seed, 240, batch=32)


@program("h_memorised_but_general")
def _memorised(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 128, 5]), he)
    return _job(model, Adam(model.parameters(), 5e-3), data.clusters(spread=1.5), seed, 400)


@program("h_gap_without_turn")
def _gap(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 5]), he)
    split = _few(data.clusters(spread=1.2), 250)
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), split, seed, 150)


# --------------------------------------------------------------------------------------------------------- underfitting


def _rings(num: int = 1000, seed: int = 6) -> data.Split:
    """A disc inside a ring: no straight line separates them."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (num,), generator=g)
    angle = 6.2832 * torch.rand(num, generator=g)
    radius = 0.6 + 1.0 * y + 0.15 * torch.randn(num, generator=g)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    k = int(0.75 * num)
    return (x[:k], y[:k]), (x[k:], y[k:])


@program("underfit_one_line_rings", "underfitting", also_ok=("missing_nonlinearity", "bottleneck_layer"))
def _one_line(seed: int, fixed: bool) -> Job:
    model = fill(mlp([2, 16, 2]), he) if fixed else fill(mlp([2, 2]), xavier)
    return _job(model, Adam(model.parameters(), 1e-2), _rings(), seed)


@program("underfit_one_hidden_unit", "underfitting", also_ok=("bottleneck_layer", "dead_relu"))
def _one_hidden(seed: int, fixed: bool) -> Job:
    model = fill(mlp([6, 32 if fixed else 1, 8]), he)
    g = torch.Generator().manual_seed(4)
    x = torch.randn(1000, 6, generator=g)
    y = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long() + 4 * (x[:, 2] * x[:, 3] > 0).long()
    return _job(model, Adam(model.parameters(), 1e-2), ((x[:750], y[:750]), (x[750:], y[750:])), seed)


@program("underfit_linear_on_waves", "underfitting", also_ok=("missing_nonlinearity", "bottleneck_layer"))
def _linear_waves(seed: int, fixed: bool) -> Job:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(1000, 3, generator=g)
    y = torch.sin(3 * x[:, :1]) + torch.cos(2 * x[:, 1:2])
    y = (y - y.mean()) / y.std()
    model = fill(mlp([3, 64, 64, 1]), he) if fixed else fill(mlp([3, 1]), xavier)
    return _job(model, Adam(model.parameters(), 5e-3), ((x[:750], y[:750]), (x[750:], y[750:])), seed, 400)


class Averaged(nn.Module):
    """Tokens without their order: the mean embedding of all positions, whatever the position to be predicted."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x)
        mean = h.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return self.head(mean)  # type: ignore[no-any-return]


@program("underfit_bag_of_tokens", "underfitting", also_ok=("bottleneck_layer", "lr_too_low", "missing_nonlinearity"))
def _bag(seed: int, fixed: bool) -> Job:
    model = LanguageModel(layers=1) if fixed else Averaged(24, 4)
    val = next(data.language(seed + 77, batch=64, pool=1))
    optimizer = AdamW(model.parameters(), 5e-3)
    return Job(model, optimizer, token_loss, data.language(seed), 150, val=val, val_every=25)


@program("h_entropy_of_the_source")
def _entropy(seed: int, fixed: bool) -> Job:
    model = LanguageModel(layers=1)
    val = next(data.language(seed + 77, batch=64, pool=1, choices=8))
    optimizer = AdamW(model.parameters(), 5e-3)
    return Job(model, optimizer, token_loss, data.language(seed, choices=8), 150, val=val, val_every=25)


@program("h_overlapping_classes")
def _overlapping(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 32, 5]), he)
    return _job(model, Adam(model.parameters(), 1e-3), data.clusters(4000, spread=3.0), seed, 300)


@program("h_noisy_regression")
def _noisy_regression(seed: int, fixed: bool) -> Job:
    (x, y), (xv, yv) = data.slopes(3000)
    g = torch.Generator().manual_seed(seed)
    y, yv = (y + torch.randn(y.shape, generator=g)) / 2**0.5, (yv + torch.randn(yv.shape, generator=g)) / 2**0.5
    model = fill(mlp([6, 32, 1]), he)
    return _job(model, Adam(model.parameters(), 2e-3), ((x, y), (xv, yv)), seed, 200)


# -------------------------------------------------------------------------------------------------------------- dropout


@program("dropout_nine_tenths_mlp", "excessive_dropout", also_ok=("underfitting",), source="UMLAUT: dropout above 0.5")
def _dropout_mlp(seed: int, fixed: bool) -> Job:
    model = _dropping(fill(mlp([20, 64, 32, 5]), he), 0.2 if fixed else 0.9)  # type: ignore[arg-type]
    return _job(model, Adam(model.parameters(), 2e-3), data.clusters(), seed)


@program("dropout_four_fifths_conv", "excessive_dropout", also_ok=("underfitting",), source="UMLAUT: dropout above 0.5")
def _dropout_conv(seed: int, fixed: bool) -> Job:
    model = _dropping(fill(cnn([8, 16], 32, 8), he), 0.1 if fixed else 0.8)  # type: ignore[arg-type]
    return _job(model, Adam(model.parameters(), 2e-3), data.images(), seed, 200)


@program("h_dropout_half")
def _dropout_half(seed: int, fixed: bool) -> Job:
    model = _dropping(fill(mlp([20, 128, 5]), he), 0.5)  # type: ignore[arg-type]
    return _job(model, Adam(model.parameters(), 2e-3), data.clusters(), seed)
