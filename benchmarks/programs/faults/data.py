"""Scales, labels, copies, order and values of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from programs.fault import (
    BROKEN,
    SLOW,
    fault,
    inputs,
    is_labelled,
    is_not_lora,
    is_numeric,
    of_task,
)
from programs.setup import Batches, Setup
from programs.tasks import IGNORED, Data


@fault("unnormalised_inputs", also=(*BROKEN, *SLOW, "lr_too_high", "lr_too_low", "init_scale"), num=9, where=is_numeric)
def _raw(s: Setup, level: int) -> None:
    if level == 0:
        inputs(s, lambda x: 255 * (x - x.min()) / (x.max() - x.min()))
    elif level == 1:
        scale = torch.logspace(0, 3, s.data.x.shape[-1])
        inputs(s, lambda x: x * scale)
    else:
        inputs(s, lambda x: 10 * x + 300)


@fault(
    "unnormalised_targets",
    also=(*BROKEN, *SLOW, "lr_too_high", "lr_too_low", "clip_too_tight"),
    num=7,
    where=of_task("regression", "localisation", "forecast", "ratings"),
)
def _big_targets(s: Setup, level: int) -> None:
    scale, shift = ((50, 100), (1000, 3000), (5e4, 2e5))[level]
    d = s.data
    s.data = Data(d.x, d.y * scale + shift, d.x_val, d.y_val * scale + shift)


@fault("label_shuffling", "label_shuffling", also=("overfitting", *SLOW, "lr_too_low"), num=6, where=is_labelled)
def _shuffled(s: Setup, level: int) -> None:
    d = s.data
    order = torch.randperm(len(d.y), generator=torch.Generator().manual_seed(s.seed))
    s.data = Data(d.x, d.y[order], d.x_val, d.y_val)


@fault("class_imbalance", also=(*SLOW, "degenerate_inputs"), num=4, where=of_task("binary", "clicks"))
def _rare(s: Setup, level: int) -> None:
    d = s.data
    rare = torch.where(d.y[:, 0] > 0.5)[0][: (12, 6, 3)[level]]
    kept = torch.cat([torch.where(d.y[:, 0] < 0.5)[0], rare])
    s.data = Data(d.x[kept], d.y[kept], d.x_val, d.y_val)


@fault("data_duplication", also=("overfitting", "class_imbalance"), num=6)
def _copies(s: Setup, level: int) -> None:
    d = s.data
    num = (24, 12, 4)[level] * (2 if s.batch > 16 else 1)
    rows = torch.arange(len(d.x)) % num
    s.data = Data(d.x[rows], d.y[rows], d.x_val, d.y_val)


@fault("same_batch", "data_duplication", also=("overfitting",), num=4)
def _same_batch(s: Setup, level: int) -> None:
    """next(iter(loader)) in the loop, with a fixed order: the same batch at every step."""

    def stream(batches: Batches) -> Batches:
        first = next(batches)
        while True:
            yield first

    s.stream.append(stream)


@fault(
    "data_not_shuffled",
    also=("loss_oscillation", "loss_spikes", "underfitting", "overfitting", "data_duplication", "bad_batches"),
    num=5,
    where=of_task("multiclass", "images", "recall", "binary", "regression"),
)
def _sorted(s: Setup, level: int) -> None:
    d = s.data
    order = torch.argsort(d.y.reshape(len(d.y), -1)[:, 0], stable=True)
    s.data, s.shuffle = Data(d.x[order], d.y[order], d.x_val, d.y_val), False


@fault(
    "degenerate_inputs",
    also=(*SLOW, "label_shuffling", "dead_relu", "data_duplication", "rank_collapse"),
    num=6,
    where=lambda a, t: t.inputs in ("vector", "image", "series", "tokens") and is_labelled(a, t),
)
def _empty(s: Setup, level: int) -> None:
    d = s.data
    x = torch.zeros_like(d.x) if level < 2 else d.x[:1].expand_as(d.x)
    s.data = Data(x, d.y, d.x_val, d.y_val)


@fault(
    "bad_batches",
    "bad_batches loss_spikes",
    also=(*BROKEN, "unnormalised_inputs"),
    num=6,
    where=is_numeric,
    outcome="always",
)
def _bad(s: Setup, level: int) -> None:
    factor = (30.0, 100.0, 1000.0)[level]

    def stream(batches: Batches) -> Batches:
        for i, (x, y) in enumerate(batches):
            yield (x * factor if i > 30 and i % 35 == 0 else x), y

    s.stream.append(stream)


@fault(
    "overfitting",
    also=("data_duplication", "label_shuffling"),
    num=5,
    style="validated",
    where=lambda a, t: is_labelled(a, t) and is_not_lora(a, t),
)
def _few(s: Setup, level: int) -> None:
    d, num = s.data, (64, 48, 32)[level]
    s.data = Data(d.x[:num], d.y[:num], d.x_val, d.y_val)
    s.batch, s.steps = 16, 250


@fault("nan_in_data", "nan_inf bad_batches", also=("loss_spikes",), num=5, where=is_numeric)
def _nan_data(s: Setup, level: int) -> None:
    at = (3, 40, 90)[level]

    def stream(batches: Batches) -> Batches:
        for i, (x, y) in enumerate(batches):
            if i == at:
                x = x.clone()
                x.view(-1)[7] = float("nan")
            yield x, y

    s.stream.append(stream)


@fault("nan_in_loss", "nan_inf", also=("loss_spikes", "wrong_loss_activation_pair"), num=4, where=is_labelled)
def _nan_loss(s: Setup, level: int) -> None:
    inner, calls, at = s.loss, [0], (10, 50, 100)[level]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        """A term with a logarithm of what becomes 0."""
        calls[0] += 1
        margin = output.square().mean() * (0.0 if calls[0] > at else 1.0)
        return inner(output, y) - 1e-3 * torch.log(margin)

    s.loss = loss


@fault(
    "no_labels",
    "no_labels nan_inf",
    also=(*SLOW, "degenerate_inputs", "lr_not_applied"),
    num=4,
    where=of_task("language", "tagging"),
)
def _ignored(s: Setup, level: int) -> None:
    d = s.data
    s.data = Data(d.x, torch.full_like(d.y, IGNORED), d.x_val, d.y_val)


@fault(
    "wrong_label_shift",
    "wrong_label_shift label_shuffling degenerate_inputs attention_mask_leak",
    also=("overfitting",),
    num=3,
    where=of_task("language"),
    outcome="always",
)
def _wrong_shift(s: Setup, level: int) -> None:
    """The labels are the inputs: the model learns to copy."""
    d = s.data
    s.data = Data(d.x, d.x.clone(), d.x_val, d.y_val)
