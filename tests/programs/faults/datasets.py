"""Faults of the data: scales, labels, order, copies, emptiness; and data that only look faulty."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

from faults import data
from faults.program import Batch, Job, endless, program
from faults.stacks import LanguageModel, cnn, fill, he, mlp, token_loss, xavier

_SCALE = (
    "lr_too_high", "exploding_gradients", "dead_relu", "loss_spikes", "loss_oscillation", "saturated_activations",
    "nan_inf", "underfitting", "vanishing_gradients", "lr_too_low", "init_scale",
)  # fmt: skip


def _job(
    model: nn.Module, optimizer: Optimizer, split: data.Split, seed: int, steps: int = 250, *, batch: int = 50
) -> Job:
    (x, y), val = split
    is_class = y.dtype == torch.long
    loss: nn.Module = nn.CrossEntropyLoss() if is_class else nn.MSELoss()
    batches = endless(x, y, batch, seed)
    return Job(model, optimizer, loss, batches, steps, val=val, val_every=steps // 10, is_accuracy=is_class)


def _inputs(split: data.Split, scale: Tensor | float, shift: Tensor | float = 0.0) -> data.Split:
    (x, y), (xv, yv) = split
    return (scale * x + shift, y), (scale * xv + shift, yv)


# ----------------------------------------------------------------------------------------------------- scales of inputs


def _pixels(scale: float) -> data.Split:
    """Images with values from 0 to `scale`."""
    (x, y), (xv, yv) = data.images()
    low, high = x.min(), x.max()
    return (scale * (x - low) / (high - low), y), (scale * (xv - low) / (high - low), yv)


@program("inputs_raw_pixels", "unnormalised_inputs", also_ok=_SCALE, source="TheDeepChecker: missing normalization")
def _raw_pixels(seed: int, fixed: bool) -> Job:
    model = fill(cnn([8, 16], 32, 8), he)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9 if fixed else 0.0)
    return _job(model, optimizer, _pixels(1.0 if fixed else 255.0), seed, 300)


@program("inputs_mixed_units", "unnormalised_inputs", also_ok=_SCALE, source="DeepFD: features on different scales")
def _mixed_units(seed: int, fixed: bool) -> Job:
    scale = torch.logspace(-1, 3, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(1))]
    split = data.clusters() if fixed else _inputs(data.clusters(), scale)
    model = fill(mlp([20, 24, 5]), he)
    return _job(model, Adam(model.parameters(), 1e-3), split, seed)


@program(
    "inputs_large_offset", "unnormalised_inputs", also_ok=_SCALE, source="years, temperatures in kelvin: mean >> std"
)
def _large_offset(seed: int, fixed: bool) -> Job:
    split = data.clusters() if fixed else _inputs(data.clusters(), 10.0, 300.0)
    model = fill(mlp([20, 32, 32, 5], nn.Tanh), xavier)
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), split, seed)


@program(
    "inputs_and_targets_raw",
    {"unnormalised_inputs", "unnormalised_targets"},
    also_ok=_SCALE,
    source="DeepLocalize SO-52800582: y = x**4 unscaled",
)
def _raw_both(seed: int, fixed: bool) -> Job:
    x = torch.linspace(-50, 50, 400)[:, None]
    y = x**3
    if fixed:
        x, y = x / x.std(), y / y.std()
    model = fill(mlp([1, 40, 40, 1], nn.Tanh), xavier)
    optimizer = Adam(model.parameters(), 5e-3 if fixed else 1e-3)
    return Job(model, optimizer, nn.MSELoss(), endless(x, y, 100, seed), 300)


@program("h_raw_inputs_batch_norm_first")
def _norm_first(seed: int, fixed: bool) -> Job:
    split = _inputs(data.clusters(), torch.logspace(-1, 3, 20))
    model = nn.Sequential(nn.BatchNorm1d(20), *fill(mlp([20, 32, 5]), he).children())
    return _job(model, Adam(model.parameters(), 2e-3), split, seed)


class _Rescaled(nn.Module):
    """Pixels are divided by 255 inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = fill(cnn([8, 16], 32, 8), he)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x / 255.0 - 0.5)  # type: ignore[no-any-return]


@program("h_pixels_scaled_inside")
def _scaled_inside(seed: int, fixed: bool) -> Job:
    model = _Rescaled()
    return _job(model, Adam(model.parameters(), 2e-3), _pixels(255.0), seed)


@program("h_unit_pixels")
def _unit_pixels(seed: int, fixed: bool) -> Job:
    model = fill(cnn([8, 16], 32, 8), he)
    return _job(model, Adam(model.parameters(), 2e-3), _pixels(1.0), seed)


@program("h_one_hot_inputs")
def _one_hot(seed: int, fixed: bool) -> Job:
    g = torch.Generator().manual_seed(4)
    parts = (torch.rand(1200, 3, generator=g) ** 3 * 20).long()
    y = (parts.sum(1) > 14).long() + (parts[:, 0] > parts[:, 1]).long()
    x = functional.one_hot(parts, 20).float().flatten(1)
    model = fill(mlp([60, 32, 3]), he)
    return _job(model, Adam(model.parameters(), 3e-3), ((x[:900], y[:900]), (x[900:], y[900:])), seed)


@program("h_word_counts")
def _word_counts(seed: int, fixed: bool) -> Job:
    g = torch.Generator().manual_seed(5)
    rate = torch.rand(4, 60, generator=g) ** 4 * 3
    y = torch.randint(4, (1200,), generator=g)
    x = torch.poisson(rate[y], generator=g)
    model = fill(mlp([60, 32, 4]), he)
    return _job(model, Adam(model.parameters(), 3e-3), ((x[:900], y[:900]), (x[900:], y[900:])), seed)


# ---------------------------------------------------------------------------------------------------- scales of targets


def _prices(scale: float, shift: float) -> data.Split:
    (x, y), (xv, yv) = data.slopes()
    return (x, scale * y + shift), (xv, scale * yv + shift)


@program("targets_house_prices", "unnormalised_targets", also_ok=("lr_too_low", "underfitting", "exploding_gradients"))
def _house_prices(seed: int, fixed: bool) -> Job:
    split = data.slopes() if fixed else _prices(5e4, 2e5)
    model = fill(mlp([6, 48, 24, 1]), he)
    return _job(model, Adam(model.parameters(), 3e-3), split, seed, 300)


@program(
    "targets_large_sgd",
    "unnormalised_targets",
    also_ok=("lr_too_high", "exploding_gradients", "nan_inf", "loss_spikes", "dead_relu", "underfitting"),
)
def _large_sgd(seed: int, fixed: bool) -> Job:
    split = data.slopes() if fixed else _prices(400.0, 1000.0)
    model = fill(mlp([6, 48, 24, 1]), he)
    return _job(model, SGD(model.parameters(), 0.02), split, seed, 300)


@program("h_targets_of_tens")
def _tens(seed: int, fixed: bool) -> Job:
    model = fill(mlp([6, 64, 32, 1]), he)
    return _job(model, Adam(model.parameters(), 1e-2), _prices(8.0, 20.0), seed, 400)


# --------------------------------------------------------------------------------------------------------------- labels


def _shuffled(split: data.Split, seed: int) -> data.Split:
    (x, y), val = split
    return (x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]), val


@program("labels_shuffled_mlp", "label_shuffling", also_ok=("overfitting", "underfitting"), source="Zhang 2017")
def _shuffled_mlp(seed: int, fixed: bool) -> Job:
    split = data.clusters() if fixed else _shuffled(data.clusters(), seed)
    model = fill(mlp([20, 128, 64, 5]), he)
    return _job(model, Adam(model.parameters(), 2e-3), split, seed, 400)


@program(
    "labels_shuffled_conv",
    "label_shuffling",
    also_ok=("overfitting", "underfitting"),
    source="TheDeepChecker: wrong labels",
)
def _shuffled_conv(seed: int, fixed: bool) -> Job:
    split = data.images() if fixed else _shuffled(data.images(), seed)
    model = fill(cnn([12, 24], 48, 8), he)
    return _job(model, SGD(model.parameters(), 0.03, momentum=0.9), split, seed, 300)


@program("h_noisy_labels_learned")
def _noisy(seed: int, fixed: bool) -> Job:
    (x, y), val = data.clusters()
    g = torch.Generator().manual_seed(seed)
    is_wrong = torch.rand(len(y), generator=g) < 0.2
    y = torch.where(is_wrong, torch.randint(5, (len(y),), generator=g), y)
    model = fill(mlp([20, 24, 5]), he)
    return _job(model, Adam(model.parameters(), 2e-3), ((x, y), val), seed, 200)


def _rare(split: data.Split, keep: float) -> data.Split:
    """Two classes, of the second only a share is kept for training."""
    (x, y), (xv, yv) = split
    chosen = torch.cat([torch.where(y != 0)[0], torch.where(y == 0)[0][: max(4, int(keep * len(y) / 5))]])
    return (x[chosen], (y[chosen] == 0).long()), (xv, (yv == 0).long())


@program(
    "imbalance_rare_class",
    "class_imbalance",
    also_ok=("underfitting", "constant_output"),
    source="SageMaker ClassImbalance",
)
def _rare_class(seed: int, fixed: bool) -> Job:
    split = _rare(data.clusters(2000, features=6, spread=1.3), 1.0 if fixed else 0.04)
    model = fill(mlp([6, 16, 2]), he)
    return _job(model, SGD(model.parameters(), 0.02, momentum=0.9), split, seed, 200)


@program(
    "imbalance_conv",
    "class_imbalance",
    also_ok=("underfitting", "constant_output"),
    source="TheDeepChecker: unbalanced data",
)
def _rare_conv(seed: int, fixed: bool) -> Job:
    (x, y), (xv, yv) = data.images(noise=1.0)
    y, yv = (y >= 4).long(), (yv >= 4).long()
    if not fixed:
        chosen = torch.cat([torch.where(y == 0)[0], torch.where(y == 1)[0][:10]])
        x, y = x[chosen], y[chosen]
    model = fill(cnn([8, 16], 32, 2), he)
    return _job(model, Adam(model.parameters(), 1e-3), ((x, y), (xv, yv)), seed, 150)


@program("h_rare_class_learned")
def _rare_learned(seed: int, fixed: bool) -> Job:
    (x, y), (xv, yv) = data.clusters(3000)
    g = torch.Generator().manual_seed(3)
    kept = (y != 0) | (torch.rand(len(y), generator=g) < 0.3)
    kept_v = (yv != 0) | (torch.rand(len(yv), generator=g) < 0.3)
    split = ((x[kept], (y[kept] == 0).long()), (xv[kept_v], (yv[kept_v] == 0).long()))
    model = fill(mlp([20, 32, 2]), he)
    return _job(model, Adam(model.parameters(), 3e-3), split, seed)


# ----------------------------------------------------------------------------------------------------- copies and order


def _language(batches: Iterator[Batch], seed: int, steps: int = 150) -> Job:
    model = LanguageModel(layers=1)
    val = next(data.language(seed + 77, batch=64, pool=1))
    optimizer = AdamW(model.parameters(), 3e-3)
    return Job(model, optimizer, token_loss, batches, steps, val=val, val_every=25, clip=1.0)


@program("copies_few_sequences", "data_duplication", also_ok=("overfitting",), source="Hernandez 2022: repeated data")
def _few_sequences(seed: int, fixed: bool) -> Job:
    return _language(data.language(seed, pool=64 if fixed else 3), seed)


@program("copies_workers_same_stream", "data_duplication", also_ok=("overfitting",), source="workers that share a seed")
def _same_stream(seed: int, fixed: bool) -> Job:
    (x, y), val = data.clusters()

    def workers() -> Iterator[Batch]:
        for batch in endless(x, y, 32, seed):
            for _ in range(1 if fixed else 4):
                yield batch

    model = fill(mlp([20, 48, 5]), he)
    return Job(model, Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss(), workers(), 240, val=val, val_every=40)


@program("copies_within_batches", "data_duplication", also_ok=("overfitting",), source="a join that multiplied rows")
def _copied_rows(seed: int, fixed: bool) -> Job:
    (x, y), val = data.clusters()
    if not fixed:
        x, y = x[:60].repeat(15, 1), y[:60].repeat(15)
    model = fill(mlp([20, 64, 5]), he)
    return _job(model, Adam(model.parameters(), 2e-3), ((x, y), val), seed)


@program("h_full_batch")
def _full_batch(seed: int, fixed: bool) -> Job:
    (x, y), val = data.slopes()
    model = fill(mlp([6, 32, 1], nn.Tanh), xavier)
    return Job(model, Adam(model.parameters(), 1e-2), nn.MSELoss(), _same(x, y), 250, val=val, val_every=50)


def _same(x: Tensor, y: Tensor) -> Iterator[Batch]:
    while True:
        yield x, y


@program("h_fixed_order_epochs")
def _fixed_order(seed: int, fixed: bool) -> Job:
    (x, y), val = data.clusters()
    model = fill(mlp([20, 48, 5]), he)
    batches = endless(x, y, 50, seed, shuffle=False)
    return Job(model, Adam(model.parameters(), 1e-3), nn.CrossEntropyLoss(), batches, 250, val=val, val_every=50)


def _sorted(split: data.Split) -> data.Split:
    (x, y), val = split
    order = torch.argsort(y.flatten(), stable=True)
    return (x[order], y[order]), val


_ORDER = ("loss_oscillation", "loss_spikes", "underfitting", "overfitting", "data_duplication", "bad_batches")


@program("order_sorted_by_class", "data_not_shuffled", also_ok=_ORDER, source="ImageFolder without shuffle=True")
def _by_class(seed: int, fixed: bool) -> Job:
    (x, y), val = data.clusters(spread=1.8) if fixed else _sorted(data.clusters(spread=1.8))
    model = fill(mlp([20, 48, 5]), he)
    batches = endless(x, y, 32, seed, shuffle=fixed)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return Job(model, optimizer, nn.CrossEntropyLoss(), batches, 300, val=val, val_every=30, is_accuracy=True)


@program("order_sorted_by_target", "data_not_shuffled", also_ok=_ORDER, source="a table sorted by its target")
def _by_target(seed: int, fixed: bool) -> Job:
    (x, y), val = data.slopes() if fixed else _sorted(data.slopes())
    model = fill(mlp([6, 48, 1]), he)
    batches = endless(x, y, 30, seed, shuffle=fixed)
    return Job(model, SGD(model.parameters(), 0.05), nn.MSELoss(), batches, 300, val=val, val_every=30)


@program("h_batches_of_two")
def _batches_of_two(seed: int, fixed: bool) -> Job:
    (x, y), val = data.clusters()
    model = fill(mlp([20, 32, 5]), he)
    batches = endless(x, y, 2, seed)
    return Job(model, SGD(model.parameters(), 0.01), nn.CrossEntropyLoss(), batches, 600, val=val, val_every=100)


# -------------------------------------------------------------------------------------------------------------- no data

_EMPTY = ("underfitting", "label_shuffling", "dead_relu", "vanishing_gradients", "constant_output", "data_duplication")


@program(
    "empty_images_of_zeros", "degenerate_inputs", also_ok=_EMPTY, source="TheDeepChecker: a loader that returns zeros"
)
def _zeros(seed: int, fixed: bool) -> Job:
    split = data.images() if fixed else _inputs(data.images(), 0.0)
    model = fill(cnn([8, 16], 32, 8), he)
    return _job(model, Adam(model.parameters(), 2e-3), split, seed, 200)


@program("empty_same_row", "degenerate_inputs", also_ok=_EMPTY, source="a dataset that ignores its index")
def _same_row(seed: int, fixed: bool) -> Job:
    (x, y), (xv, yv) = data.clusters()
    if not fixed:
        x = x[:1].expand_as(x)
    model = fill(mlp([20, 32, 5]), he)
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), ((x, y), (xv, yv)), seed, 200)
