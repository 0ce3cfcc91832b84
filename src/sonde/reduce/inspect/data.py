"""Statistics of a batch for the rules: numbers about a model's input and its targets, computed on their device.

No branch depends on a value, so nothing waits for the device; large tensors are sampled with a stride. Callers turn
autograd and autocast off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from sonde.reduce.dense import UnreadableError, dense, is_plain, work_dtype
from sonde.reduce.inspect.bits import NUM_WEIGHTS, bits, weights
from sonde.reduce.sample import sample

Values = Mapping[str, Tensor | float]

MAX_ELEMENTS: Final = 16_384
MAX_ROWS: Final = 256
MAX_FEATURES: Final = 256
MAX_LABELS: Final = 16_384
IGNORED: Final = torch.iinfo(torch.int64).max
"""Marks labels that do not count; sorts after all that do."""


def is_integer(tensor: Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)


def is_token(tensor: Tensor) -> bool:
    """Whether these are integers that name things. Bytes in three dimensions or more are images."""
    return is_integer(tensor) and not (tensor.dtype is torch.uint8 and tensor.ndim > 2)


# --------------------------------------------------------------------------------------------------------------- inputs


def inspect_input(x: Tensor) -> Values:
    """Scale, spread over features and over samples, and duplicate rows."""
    values: dict[str, Tensor | float] = {"size": float(x.shape[0] if x.ndim else 1), "is_token": float(is_token(x))}
    elements = _elements(x)
    if elements is None:
        return values
    lowest, highest = elements.aminmax()
    std, mean = std_mean(elements)
    values |= {"std": std, "mean": mean, "abs_max": torch.maximum(lowest.abs(), highest.abs())}
    if is_plain(x):
        values |= _spread(x)
    return values


def _elements(tensor: Tensor) -> Tensor | None:
    """A flat sample in a dtype for arithmetic; None if there is nothing to read."""
    try:
        values = dense(tensor)[0]
    except UnreadableError:
        return None
    return sample(values, MAX_ELEMENTS, 0).to(work_dtype(values)) if values.numel() else None


def std_mean(elements: Tensor) -> tuple[Tensor, Tensor]:
    """Over all elements. Written out, since torch's own way on the CPU takes ten times as long."""
    mean = elements.mean()
    return (elements - mean).square().mean().sqrt(), mean


def _spread(x: Tensor) -> Values:
    values: dict[str, Tensor | float] = {}
    if not is_token(x):
        values |= _features(by_feature(x))
    if x.ndim and x.shape[0] > 1:
        values["sample_std"] = batch_std(x)
        values["duplicates"] = duplicates(x)
    return values


def by_feature(x: Tensor) -> Tensor:
    """(samples, features, positions), strided: the last dimension is the feature, or dimension 1 of an image."""
    if x.ndim <= 1:
        shaped = x.reshape(-1, 1, 1)
    elif x.ndim == 2:
        shaped = x.unsqueeze(-1)
    elif x.ndim == 3:
        shaped = x.transpose(1, 2)
    else:
        shaped = x.flatten(2)
    shaped = shaped[:, :: _step(shaped.shape[1], MAX_FEATURES)]
    shaped = shaped[:: _step(shaped.shape[0], min(MAX_ELEMENTS // shaped.shape[1], MAX_ROWS))]
    room = max(MAX_ELEMENTS // (shaped.shape[0] * shaped.shape[1]), 1)
    return shaped[:, :, :: _step(shaped.shape[2], room)].to(work_dtype(x))


def _step(size: int, most: int) -> int:
    return -(-size // most)


def _features(shaped: Tensor) -> Values:
    lowest, highest = shaped.amin((0, 2)), shaped.amax((0, 2))
    largest = torch.maximum(lowest.abs(), highest.abs())
    std = (shaped - shaped.mean((0, 2), keepdim=True)).square().mean((0, 2)).sqrt()
    # The deviation of equal numbers is not always an exact zero; their extremes are equal.
    varies = highest > lowest
    return {
        "feature_std_ratio": std.amax() / torch.where(varies, std, torch.inf).amin(),
        "feature_abs_max_ratio": largest.amax() / torch.where(largest > 0, largest, torch.inf).amin(),
        "constant": (highest == lowest).to(torch.float32).mean(),
    }


def batch_std(x: Tensor) -> Tensor:
    """How much samples differ, relative to their size: 0 if all are the same."""
    rows = x[:: _step(x.shape[0], MAX_ROWS)]
    rows = rows.reshape(rows.shape[0], -1)
    columns = rows[:, :: _step(rows.shape[1], MAX_ELEMENTS // rows.shape[0])].to(work_dtype(x))
    std = (columns - columns.mean(0)).square().mean(0).sqrt()
    # The mean of equal numbers is not always that number; their extremes are equal.
    spread = torch.where(columns.amax(0) == columns.amin(0), 0.0, std).mean()
    rms = columns.square().mean().sqrt()
    return torch.where(rms > 0, spread / rms, torch.zeros_like(rms))


def duplicates(x: Tensor) -> Tensor:
    """Fraction of rows that equal another row, among the first thousand."""
    rows = x[:1024]
    rows = rows.reshape(rows.shape[0], -1)
    step = _step(rows.shape[1], min(max(4 * MAX_ELEMENTS // rows.shape[0], MAX_FEATURES), NUM_WEIGHTS))
    words = bits(rows[:, ::step].contiguous())
    hashed = (words * weights(words.shape[1], x.device)).sum(1).sort().values
    same = hashed[1:] == hashed[:-1]
    edge = same.new_zeros(1)
    return (torch.cat([same, edge]) | torch.cat([edge, same])).to(torch.float32).mean()


# -------------------------------------------------------------------------------------------------------------- targets


def inspect_target(y: Tensor, ignore_index: int = -100) -> Values:
    """Scale of the targets, and the number of distinct ones."""
    if is_integer(y) or y.dtype is torch.bool:
        return {"is_class": 1.0, **_inspect_classes(sorted_labels(y, ignore_index))} if y.numel() else {}
    elements = _elements(y)
    if elements is None:
        return {}
    std, mean = std_mean(elements)
    lowest, highest = elements.aminmax()
    is_binary = ((elements == 0) | (elements == 1)).all()
    num, top = _distinct(elements[:MAX_LABELS].sort().values)
    if y.ndim == 2 and y.shape[1] > 1 and is_plain(y):
        num, top = _of_one_hot(y, is_binary, num, top)
    return {
        "is_class": is_binary.to(torch.float32), "num_classes": num, "top_share": top,
        "std": std, "mean": mean, "min": lowest, "max": highest,
    }  # fmt: skip


def sorted_labels(y: Tensor, ignore_index: int) -> Tensor:
    """A sorted sample of integer labels; those that do not count are IGNORED, and last."""
    labels = sample(y, MAX_LABELS, 0).to(torch.int64)
    return torch.where(labels == ignore_index, IGNORED, labels).sort().values


def _inspect_classes(labels: Tensor) -> Values:
    counts = labels != IGNORED
    num_valid = counts.sum()
    num, top = _distinct(labels)
    wide = torch.float64 if labels.device.type != "mps" else torch.float32
    values = torch.where(counts, labels, 0).to(wide)
    mean = values.sum() / num_valid
    std = (torch.where(counts, values - mean, 0.0).square().sum() / num_valid).sqrt()
    highest = torch.where(counts, labels, torch.iinfo(torch.int64).min).amax()
    return {
        "num_classes": num, "top_share": top, "std": std, "mean": mean, "min": labels[0], "max": highest,
        "counted": num_valid / len(labels),
    }  # fmt: skip


def _distinct(ordered: Tensor) -> tuple[Tensor, Tensor]:
    """The number of distinct values in a sorted list, and the fraction of the most common. IGNORED does not count."""
    counts = ordered != IGNORED if not ordered.dtype.is_floating_point else torch.ones_like(ordered, dtype=torch.bool)
    run = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
    is_first = torch.ones_like(counts)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return (is_first & counts).sum(), torch.where(counts, run, 0).amax() / counts.sum()


def _of_one_hot(y: Tensor, is_binary: Tensor, num: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """One-hot rows are classes: the class counts, not the zeros."""
    rows = y[:: _step(y.shape[0], MAX_ROWS)].to(work_dtype(y))
    is_one_hot = is_binary & (rows.sum(1) == 1).all()
    num_rows, top_rows = _distinct(rows.argmax(1).sort().values)
    return torch.where(is_one_hot, num_rows, num), torch.where(is_one_hot, top_rows, top)
