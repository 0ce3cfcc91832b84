"""The origin of NaN and Inf: what was non-finite at the first bad step, and what was still finite.

Within a step, values appear in the order weights, data, forward, loss, backward, update; the first bad one is the
origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.measures.events import happenings, number
from sonde.diagnose.measures.loss import loss_name
from sonde.diagnose.measures.model import structure
from sonde.schema.losses import SEEN_TRAINING
from sonde.schema.window import Window

NEEDS: Final = (
    "act/*/nan_fraction",
    "act/*/nonfinite_fraction",
    "act/*/max_abs",
    "grad/*/nonfinite_fraction",
    "update/*/nonfinite_fraction",
    "param/*/nonfinite_fraction",
    "custom/*/nonfinite_fraction",
)
TOO_MANY_SKIPS: Final = 20
"""Consecutive skipped steps that are a fault. GradScaler starts at 65,536 and halves: after 17, it no longer scales
the loss up."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The first step with a non-finite value, and everything that was non-finite there."""

    step: int
    weights: tuple[str, ...] = ()
    """Parameters as the forward pass used them."""
    data: tuple[str, ...] = ()
    """`batch.0` is the first tensor of the batch."""
    forward: Mapping[str, Any] = field(default_factory=dict)
    """Details of the non-finite event of this step, recorded by the hooks on all modules; empty if there was none."""
    activations: tuple[str, ...] = ()
    is_forward_seen: bool = False
    """Whether the outputs of the modules were checked at this step."""
    loss: bool = False
    grads: tuple[str, ...] = ()
    sound_grads: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    is_lasting: bool = True
    """Whether values were still non-finite at the end of the run."""
    num_skipped: int = 0
    """Number of consecutive steps, starting here, that a scaler skipped."""
    matters: bool = True
    """Whether the loss, a gradient or a weight was affected; otherwise it stayed inside the forward pass."""


def first_moment(window: Window) -> Moment | None:
    """The first non-finite moment; None if everything that was measured is finite."""
    rows = _skips_in_a_row(window)
    skipped = {int(step) for row in rows if len(row) < TOO_MANY_SKIPS for step in row}
    grads = _first_bad(window, "grad", skipped)
    weights, updates = _first_bad(window, "param"), _first_bad(window, "update", skipped)
    loss_steps = _bad_loss(window, skipped)
    touched = [*grads.values(), *weights.values(), *updates.values(), *loss_steps[:1]]
    events = sorted(happenings(window, "nonfinite"), key=lambda e: (e.step, number(e.details, "micro_batch", 0)))
    inside = [event.step for event in events[:1]] or list(_first_bad(window, "act").values())
    if not touched and not inside:
        return None
    step = min([*touched, *inside])
    return Moment(
        step,
        weights=_at(weights, step),
        data=_new_in_data(window, step),
        forward=next((event.details for event in events if event.step == step and event.details), {}),
        activations=_at(_first_bad(window, "act"), step),
        is_forward_seen=(bool(events) and _is_checked(window, step)) or _has_step(window, "act", step),
        loss=step in loss_steps,
        grads=_at(grads, step),
        sound_grads=tuple(
            site
            for site, steps, values in window.by_site("grad/*/nonfinite_fraction")
            if (values[steps == step] == 0).any()
        ),
        updates=_at(updates, step),
        is_lasting=_is_lasting(window, skipped),
        num_skipped=max((len(row) for row in rows if step in row), default=0),
        matters=bool(touched),
    )


def _skips_in_a_row(window: Window) -> list[NDArray[np.int64]]:
    """Runs of consecutive steps that a scaler skipped. Short ones are normal while it searches for its scale."""
    steps = np.unique([event.step for event in happenings(window, "skipped_step")]).astype(np.int64)
    return np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)


def _first_bad(window: Window, kind: str, without: set[int] | None = None) -> dict[str, int]:
    """The first non-finite step of each site. Infinity in an activation may be a mask; NaN never is."""
    stat = "nan_fraction" if kind == "act" else "nonfinite_fraction"
    found = {}
    for site, steps, values in window.by_site(f"{kind}/*/{stat}"):
        bad = steps[values > 0]
        if without:
            bad = bad[~np.isin(bad, list(without))]
        if len(bad):
            found[site] = int(bad[0])
    return found


def _at(first: Mapping[str, int], step: int) -> tuple[str, ...]:
    return tuple(site for site, own in first.items() if own == step)


def _new_in_data(window: Window, step: int) -> tuple[str, ...]:
    """Tensors of the batch that are non-finite now and were finite in the previous batch, unlike a mask of -inf."""
    found = []
    for site, steps, values in window.by_site("custom/batch.*/nonfinite_fraction"):
        now, before = values[steps == step], values[steps < step]
        if (now > 0).any() and not (len(before) and before[-1] > 0):
            found.append(site)
    return tuple(found)


def _bad_loss(window: Window, skipped: set[int]) -> list[int]:
    """The steps with a non-finite loss. One that sonde measured at a skipped step may be finite before scaling."""
    name = loss_name(window)
    if name is None:
        return []
    steps, values = window.get(name)
    bad = steps[~np.isfinite(values)]
    return [int(step) for step in bad if name != SEEN_TRAINING or int(step) not in skipped]


def _is_checked(window: Window, step: int) -> bool:
    """Whether forward passes were checked at every step then: the budget may have made the check rarer."""
    changes = [change.details.get("stride") for change in happenings(window, "cadence") if change.step < step]
    return not (changes and isinstance(changes[-1], Mapping) and number(changes[-1], "finite", 1.0) > 1.0)


def _has_step(window: Window, kind: str, step: int) -> bool:
    return any((steps == step).any() for _, steps, _ in window.by_site(f"{kind}/*/nan_fraction"))


def _is_lasting(window: Window, skipped: set[int]) -> bool:
    """Whether the loss, a weight or a gradient was still non-finite when the run ended."""
    name = loss_name(window)
    values = window.get(name)[1] if name is not None else np.empty(0)
    if len(values) and not np.isfinite(values[-1]):
        return True
    last = [
        (steps[-1], own[-1])
        for kind in ("param", "grad")
        for _, steps, own in window.by_site(f"{kind}/*/nonfinite_fraction")
        if len(own)
    ]
    return any(value > 0 and step not in skipped for step, value in last)


def backward_gap(window: Window, moment: Moment) -> tuple[str, str]:
    """The last parameter with a bad gradient and the first with a finite one after it, in forward order."""
    order = {module.name: module.order for module in structure(window).modules}
    owners = {p.name: order.get(p.owner, -1) for p in structure(window).parameters}
    bad = max(moment.grads, key=lambda name: owners.get(name, -1), default="")
    later = [name for name in moment.sound_grads if owners.get(name, -1) > owners.get(bad, -1)]
    return bad, min(later, key=lambda name: owners.get(name, -1), default="")


def between(window: Window, bad: str, sound: str) -> list[str]:
    """Leaf modules that ran between the modules of two parameters."""
    known = structure(window)
    order = {module.name: module.order for module in known.modules}
    owner = {p.name: p.owner for p in known.parameters}
    low, high = order.get(owner.get(bad, ""), -1), order.get(owner.get(sound, ""), 10**9) if sound else 10**9
    return [m.name for m in known.in_order if m.is_leaf and low < m.order < high]
