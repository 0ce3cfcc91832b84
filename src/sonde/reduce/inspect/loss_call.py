"""Statistics of a loss call for the rules: its value, its reduction, its shapes, and its arguments."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from sonde.reduce.dense import is_plain, work_dtype
from sonde.reduce.inspect.baseline import EVEN, Balance, Baseline
from sonde.reduce.inspect.data import MAX_ROWS, Values, inspect_target
from sonde.reduce.inspect.evaluated import num_terms
from sonde.reduce.inspect.output import inspect_output
from sonde.reduce.inspect.softmax import log_spread

REDUCTIONS: Final = {"mean": 0.0, "batchmean": 0.0, "sum": 1.0, "none": 2.0}
_MIN_WIDTH: Final = 3
_CLASSES: Final = ("cross_entropy", "nll_loss")


def inspect_loss(
    name: str,
    output: Tensor,
    target: Tensor,
    result: Tensor,
    reduction: str,
    ignore_index: int,
    baseline: Baseline,
    balance: Balance = EVEN,
) -> dict[str, Values]:
    """{site: values} of one call; for the loss, and for the output and the target as the loss received them."""
    is_choice = name in _CLASSES
    class_dim = 1 if is_choice and output.ndim > 1 else -1
    width = output.shape[class_dim] if output.ndim else 1
    threshold = 0.5 if name == "binary_cross_entropy" else 0.0
    is_binary = name.startswith("binary_cross_entropy")
    if is_choice and output.ndim == 1:
        output, target = output.unsqueeze(0), target.reshape(1, *target.shape)
    loss: dict[str, Tensor | float] = {
        "reduction": REDUCTIONS.get(reduction, -1.0),
        "numel": float(_num_terms(is_choice, output, target)),
        "target_numel": float(target.numel()),
    }
    if reduction == "sum":
        loss["terms"] = num_terms(name, target, reduction, ignore_index)
    if result.numel():
        loss["value"] = result.mean()
    expected = baseline.of_loss(name, target, width, ignore_index, balance)
    if expected is not None:
        loss["baseline"] = expected
        if baseline.class_entropy is not None:
            loss["class_entropy"] = baseline.class_entropy
    judged = target if is_choice or is_binary else None
    return {
        "loss": loss,
        "output": {
            **inspect_output(output, judged, class_dim=class_dim, ignore_index=ignore_index, threshold=threshold),
            **(_spread(output) if name == "kl_div" else {}),
        },
        "target": {**inspect_target(target, ignore_index), **(_spread(target) if name == "kl_div" else {})},
    }


def _spread(distributions: Tensor) -> Values:
    """How far the logarithms of distributions are apart, for distributions and for their logarithms."""
    if distributions.ndim != 2 or distributions.shape[1] < _MIN_WIDTH or not is_plain(distributions):
        return {}
    rows = distributions[:MAX_ROWS].to(work_dtype(distributions))
    is_log = (rows <= 0).all()
    return {"log_spread": log_spread(torch.where(is_log, rows, rows.clamp(min=torch.finfo(rows.dtype).tiny).log()))}


def _num_terms(is_choice: bool, output: Tensor, target: Tensor) -> int:
    """The number of terms before reduction; a forgotten dimension squares it."""
    if is_choice:
        return output.numel() // max(output.shape[1], 1)
    try:
        return math.prod(torch.broadcast_shapes(output.shape, target.shape))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return max(output.numel(), target.numel())
