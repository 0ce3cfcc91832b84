"""Layers that are useless although gradients flow: their outputs are alike for all samples, or their units are copies.

Rank collapse is judged by how much the outputs of a layer differ between samples, or between the tokens of a sequence.
Units are copies if they have the same weights and the same gradient: then they stay the same for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.inspect.units import as_rows, strided
from sonde.schema.names import as_code
from sonde.show.flow.issue import Issue

MATRICES: Final = (nn.Linear, nn.modules.conv._ConvNd)
MAX_ROWS: Final = 256
MIN_ROWS: Final = 8
MIN_TOKENS: Final = 4
COLLAPSED: Final = 1e-6
"""Variance between samples over the mean square of the outputs, below which they are nearly the same."""
DISTINCT: Final = 1e-2
"""The same at the first layer: above it, the inputs do differ."""
MIN_LAYERS: Final = 3
"""Number of layers at the end that have to be collapsed, and they are a third of all."""
MAX_UNITS: Final = 16
MAX_WEIGHTS: Final = 64
ALIKE: Final = 1e-4
"""Largest difference between the gradients of units, over the largest gradient."""


def differences(module: nn.Module, output: Any) -> Tensor | None:
    """(2,) the variance of a layer's outputs between samples, and between the tokens of a sequence (NaN if there are
    none), over their mean square."""
    if not isinstance(module, MATRICES) or not is_plain_tensor(output) or output.ndim < 2:
        return None
    channel = output.ndim - 1 if isinstance(module, nn.Linear) else 1
    rows = as_rows(output, channel, MAX_ROWS).float()
    if len(rows) < MIN_ROWS:
        return None
    between = _variance(rows[None])
    is_sequence = output.ndim == 3 and channel == 2 and output.shape[1] >= MIN_TOKENS
    tokens = _variance(strided(strided(output.detach(), 0, 8), 1, 32).float()) if is_sequence else between * math.nan
    return torch.stack([between, tokens])


def _variance(rows: Tensor) -> Tensor:
    """The variance of (samples, rows, units) within each sample, over the mean square of all."""
    return (rows - rows.mean(1, keepdim=True)).square().mean() / rows.square().mean()


def rank_collapse(found: Sequence[tuple[str, float, float]]) -> list[Issue]:
    """`found`: layer, variance between samples and between tokens, in the order of the forward pass."""
    for index, what in ((1, "samples"), (2, "tokens of a sequence")):
        values = [(str(one[0]), float(one[index])) for one in found if one[index] == one[index]]
        at_end = 0
        while at_end < len(values) and values[-1 - at_end][1] < COLLAPSED:
            at_end += 1
        # In one step it is not lost on the way: the layers get other inputs, such as queries that all start alike.
        is_gradual = at_end < len(values) and values[-at_end - 1][1] < DISTINCT < values[0][1]
        if max(MIN_LAYERS, len(values) / 3) <= at_end and is_gradual:
            first = values[-at_end][0]
            return [
                Issue(
                    type="RANK_COLLAPSE",
                    severity="HIGH",
                    layer="",
                    message=(
                        f"from {first} on, the outputs of different {what} are nearly the same: they differ by "
                        f"{values[-1][1] ** 0.5:.1e} of their size at the end"
                    ),
                    recommendation=(
                        "x = x + block(norm(x))  # a skip connection around each block keeps the inputs apart\n"
                        f"nn.init.kaiming_normal_({as_code(first)}.weight); nn.init.zeros_({as_code(first)}.bias)"
                    ),
                    value=values[-1][1],
                    healthy=f"above {COLLAPSED:g}",
                )
            ]
    return []


def likeness(weight: Tensor, grad: Tensor) -> Tensor | None:
    """(4,) the largest difference between units in weight and in gradient, and the largest of each; on a sample."""
    if weight.ndim < 2 or weight.shape[0] < 2 or grad.shape != weight.shape:
        return None
    w, g = (
        strided(strided(tensor.detach(), 0, MAX_UNITS).flatten(1), 1, MAX_WEIGHTS).float() for tensor in (weight, grad)
    )
    return torch.stack([(w - w[:1]).abs().amax(), (g - g[:1]).abs().amax(), w.abs().amax(), g.abs().amax()])


def symmetric(found: Sequence[tuple[str, Sequence[float]]]) -> list[Issue]:
    """`found`: parameter, and its likeness as numbers."""
    return [
        Issue(
            type="SYMMETRIC",
            severity="HIGH",
            layer=name.rpartition(".")[0],
            message=f"{name}: all units have the same weights and the same gradient, so they stay copies",
            recommendation=f"nn.init.kaiming_normal_({as_code(name)})  # random, not constant",
            value=gap / largest,
            healthy=f"above {ALIKE:g}",
        )
        for name, (apart, gap, size, largest) in found
        if apart <= 1e-7 * size and 0 < largest < math.inf and gap <= ALIKE * largest
    ]
