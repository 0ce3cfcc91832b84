"""Statistics of a model's output, or of the input of a loss, for the rules. As in `data.py`, nothing waits."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from sonde.reduce.dense import is_plain, work_dtype
from sonde.reduce.inspect.data import MAX_ELEMENTS, MAX_ROWS, Values, batch_std, is_integer, std_mean
from sonde.reduce.sample import sample

_MOST: Final = 2**18
"""Elements of all sampled rows together: a vocabulary is wide, and one row of it is not a sample."""
_MIN_ROWS: Final = 8


def inspect_output(
    output: Tensor,
    target: Tensor | None = None,
    *,
    class_dim: int = -1,
    ignore_index: int = -100,
    threshold: float = 0.0,
) -> Values:
    """Range, whether rows or columns are distributions, how confident and how varied they are, and their accuracy.

    `class_dim` is the dimension of the classes; `threshold` is the decision boundary of a single unit.
    """
    if not output.numel() or not is_plain(output) or not output.dtype.is_floating_point:
        return {}
    if output.ndim == 0:
        return {"min": output, "max": output, "logit_max": output.abs()}
    elements = sample(output, MAX_ELEMENTS, 0).to(work_dtype(output))
    lowest, highest = elements.aminmax()
    moved = output.movedim(class_dim, -1) if output.ndim > 1 else output.unsqueeze(-1)
    width = moved.shape[-1]
    values: dict[str, Tensor | float] = {
        "min": lowest, "max": highest, "std": std_mean(elements)[0], "width": float(width),
        "logit_max": torch.maximum(lowest.abs(), highest.abs()),
    }  # fmt: skip
    if output.shape[0] > 1:
        values["batch_std"] = batch_std(output)
        values |= _columns(output)
    picks = _picks(moved)
    rows = take_rows(moved, picks).to(work_dtype(output))
    values |= _rows(rows, tolerance=1e-3 if output.dtype.itemsize > 2 else 2e-2)
    labels = _labels(target, moved, picks)
    if width > 1:
        values |= _choices(rows.argmax(-1), labels, ignore_index)
    else:
        values |= _choices((rows[:, 0] > threshold).to(torch.int64), labels, ignore_index)
    return values


def _picks(moved: Tensor) -> tuple[int, int]:
    """(stride, number) of the sampled rows; the stride shares no factor with their number."""
    num = math.prod(moved.shape[:-1])
    size = min(num, MAX_ROWS, max(_MOST // moved.shape[-1], _MIN_ROWS))
    stride = num // size
    while stride > 1 and math.gcd(stride, num) > 1:
        stride -= 1
    return stride, size


def take_rows(moved: Tensor, picks: tuple[int, int]) -> Tensor:
    """Rows i·stride of all leading dimensions taken as one. Only the sampled rows are copied."""
    stride, size = picks
    if moved.is_contiguous():
        return moved.view(-1, moved.shape[-1])[: (size - 1) * stride + 1 : stride]
    flat = torch.arange(0, (size - 1) * stride + 1, stride, device=moved.device)
    index: list[Tensor] = []
    for length in reversed(moved.shape[:-1]):
        index.append(flat % length)
        flat = flat.div(length, rounding_mode="floor")
    return moved[tuple(reversed(index))]


def _labels(target: Tensor | None, moved: Tensor, picks: tuple[int, int]) -> Tensor | None:
    """The class of each sampled row, if the targets are one class per row."""
    if target is None or not target.numel():
        return None
    leading, width = moved.shape[:-1], moved.shape[-1]
    stride, size = picks
    if width > 1 and target.dtype.is_floating_point:
        # Classes given as probabilities.
        is_written_out = target.shape == moved.shape and target.ndim == 2
        return take_rows(target, picks).argmax(-1) if is_written_out else None
    if width > 1 and not is_integer(target):
        return None
    if target.numel() != math.prod(leading):
        return None
    labels = target.reshape(-1)[: (size - 1) * stride + 1 : stride]
    return labels if is_integer(labels) else (labels > 0.5).to(torch.int64)


def _rows(rows: Tensor, tolerance: float) -> Values:
    width = rows.shape[1]
    is_distribution = (rows.amin(1) >= 0) & ((rows.sum(1) - 1).abs() <= tolerance)
    values: dict[str, Tensor | float] = {"is_distribution": is_distribution.to(torch.float32).mean()}
    if width == 1:
        return values
    log_z = rows.logsumexp(1)
    is_log = (log_z.abs() <= tolerance) & (rows.amax(1) <= 0)
    p = torch.where(is_distribution[:, None], rows, (rows - log_z[:, None]).exp())
    tiny = torch.finfo(p.dtype).tiny
    entropy = -(p * p.clamp(min=tiny).log()).sum(1).mean() / math.log(width)
    return values | {
        "is_log_distribution": is_log.to(torch.float32).mean(),
        "entropy": entropy,
        "log_z": log_z.abs().mean(),
    }


def _columns(output: Tensor) -> Values:
    """Whether a softmax, or its logarithm, ran over the batch: the probabilities of a unit add up to one over it."""
    if output.ndim != 2 or output.shape[0] > MAX_ELEMENTS:
        return {}
    step = -(-output.shape[1] // max(MAX_ELEMENTS // output.shape[0], 8))
    columns = output[:, ::step].to(work_dtype(output))
    tolerance = 1e-3 if output.dtype.itemsize > 2 else 2e-2
    is_distribution = (columns.amin(0) >= 0) & ((columns.sum(0) - 1).abs() <= tolerance)
    is_log = (columns.amax(0) <= 0) & (columns.logsumexp(0).abs() <= tolerance)
    return {"column_distribution": (is_distribution | is_log).to(torch.float32).mean()}


def _choices(chosen: Tensor, labels: Tensor | None, ignore_index: int) -> Values:
    """The fraction of the most common prediction, and the accuracy."""
    ordered = chosen.sort().values
    run = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
    values: dict[str, Tensor | float] = {"top_share": run.amax() / chosen.numel()}
    if labels is not None:
        counts = labels != ignore_index
        values["accuracy"] = ((chosen == labels) & counts).sum() / counts.sum()
    return values
