"""How often each kind is recorded, if all of them together may take a given time per step. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

KINDS: Final = ("scalars", "grads", "optimizer", "activations", "inspect", "finite")
"""Parameters, updates and optimizer states are read and thinned together, as "optimizer". Scalars are the numbers that
sonde logs itself: loss, learning rate, identity of the batch, direction of the gradient."""
COME_FIRST: Final = ("scalars", "finite", "grads")
"""They take their part of the budget before the other kinds, in this order."""
MAX_STRIDE: Final = 1000
GRADS_STRIDE: Final = 10
"""Gradients are recorded at least this often, if they fit into the budget at all."""
_SCALARS_SHARES: Final = (0.05, 0.25)
"""The fraction of the budget that scalars may use, and the check for non-finite values: at least, and at most, where
gradients need the rest."""
_GRADS_SHARES: Final = (0.5, 0.9)
"""The fraction of the budget that gradients may use, and may use to be recorded at least every tenth step."""


def shared_strides(
    cost: Mapping[str, float], share: Mapping[str, float], parts: Mapping[str, int], allowed_s: float
) -> dict[str, float] | None:
    """The strides at which all kinds together take this time per step; None if they need no more than that anyway.
    Gradients as often as they fit; the other kinds share the rest, each in proportion to its schedule. `share`: the
    fraction of all steps in which a kind is scheduled. `parts`: into how many parts it is divided.

    >>> cost = dict.fromkeys(KINDS, 0.0) | {"grads": 3.0, "optimizer": 8.0}
    >>> shared_strides(cost, dict.fromkeys(KINDS, 1.0), dict.fromkeys(KINDS, 1), 1.0)["grads"]
    6.0
    """
    needed_s = sum(cost[kind] * share[kind] for kind in KINDS)
    if needed_s <= allowed_s:
        return None
    found = {}
    left_s = allowed_s
    grads_s = cost["grads"] * share["grads"] / GRADS_STRIDE / _GRADS_SHARES[1]
    least, most = (scalars_share * allowed_s for scalars_share in _SCALARS_SHARES)
    first_s = min(max((allowed_s - grads_s) / 2, least), most)
    for kind in COME_FIRST:
        kind_s = cost[kind] * share[kind]
        rarer = _grads_stride(kind_s, left_s) if kind == "grads" else _stride(kind_s, first_s)
        found[kind] = rarer / share[kind] if rarer > 1 else 1.0
        left_s -= kind_s / rarer
        needed_s -= kind_s
    rarer = needed_s / left_s if left_s > 0 else math.inf
    for kind in set(KINDS).difference(COME_FIRST):
        found[kind] = rarer / share[kind] / parts[kind] if rarer > 1 else 1.0
    return found


def differ(some: Mapping[str, float], others: Mapping[str, float], margin: float) -> bool:
    """Whether a stride is larger or smaller by more than this fraction."""
    return any(max(new, others[kind]) > (1 + margin) * min(new, others[kind]) for kind, new in some.items())


def _grads_stride(cost_s: float, allowed_s: float) -> float:
    """Gradients leave half of the budget to the other kinds, unless they would be recorded too rarely.

    >>> _grads_stride(1.0, 4.0), _grads_stride(3.0, 1.0), _grads_stride(8.0, 1.0), _grads_stride(18.0, 1.0)
    (1.0, 6.0, 10.0, 20.0)
    """
    modest, most = (_stride(cost_s, share * allowed_s) for share in _GRADS_SHARES)
    return modest if modest <= GRADS_STRIDE else max(float(GRADS_STRIDE), most)


def _stride(cost_s: float, allowed_s: float) -> float:
    """The smallest whole stride at which this costs no more than allowed per step."""
    if cost_s <= allowed_s:
        return 1.0
    return float(min(math.ceil(cost_s / allowed_s - 1e-9), MAX_STRIDE)) if allowed_s > 0 else float(MAX_STRIDE)
