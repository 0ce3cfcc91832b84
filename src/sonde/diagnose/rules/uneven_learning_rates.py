"""One parameter group is trained much faster than the others, or hardly at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax, nanmedian
from sonde.diagnose.measures.freshness import starts_fresh
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.measures.motion import NEEDS, motion
from sonde.diagnose.measures.rate import one_digit, rate
from sonde.diagnose.measures.readings import typical
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, number, percent
from sonde.schema.window import Window

APART: Final = 50.0
"""Ratio of the learning rates of two groups. Layer-wise decay and faster heads stay within about 30."""
LARGE: Final = 0.3
"""Largest early update relative to the weights; see `lr_too_high`."""
UNLEARNED: Final = 0.3
"""Final loss relative to its start, above which an untrained group is missed."""
STILL: Final = 0.01
"""Total length of all steps of a group relative to its weights; healthy runs move by 0.05 and more."""
FRESH: Final = 0.75
"""Fraction of the weights of a slow group that must start as freshly initialised: a slow body is right if it was
trained before."""


@rule(
    needs=(*NEEDS, "update/*/ratio", "param/*/rms"),
    causes=(
        "lr_too_high",
        "frozen_layers",
        "dead_relu",
        "underfitting",
        "loss_plateau",
        "loss_oscillation",
        "rank_collapse",
        "lr_too_low",
        "lr_not_applied",
        "loss_spikes",
        "vanishing_gradients",
        "exploding_gradients",
        "qkv_imbalance",
    ),
    references=("PyTorch documentation: per-parameter options of optimizers",),
)
def uneven_learning_rates(window: Window) -> Iterator[Found]:
    """The learning rates of two parameter groups are so far apart that one of them is trained far too fast, or not."""
    loss = learned(window)
    groups = _groups(window)
    if loss is None or len(groups) < 2:
        return
    rates = {group: _peak(window, own[0]) for group, own in groups.items()}
    known = {group: value for group, value in rates.items() if np.isfinite(value)}
    if len(known) < 2 or not max(known.values()) > 0:
        return
    slow, fast = min(known, key=lambda g: known[g]), max(known, key=lambda g: known[g])
    if known[slow] == 0 and (loss.has_diverged or loss.left > UNLEARNED):
        yield _untrained(groups[slow], slow[1], loss)
    elif known[slow] > 0 and known[fast] > APART * known[slow]:
        if (loss.has_diverged or loss.left > UNLEARNED) and _stands_still(window, groups[slow]):
            yield _too_slow(window, groups[slow], slow[1], known[slow], known[fast], loss)
        else:
            yield from _too_fast(window, groups[fast], fast[1], known[slow], known[fast], loss)


def _groups(window: Window) -> dict[tuple[int, int], list[Parameter]]:
    """The weight matrices of each group of each optimizer."""
    found: dict[tuple[int, int], list[Parameter]] = {}
    for parameter in structure(window).parameters:
        if parameter.trainable and parameter.in_optimizer and parameter.is_matrix:
            found.setdefault((parameter.optimizer, parameter.group), []).append(parameter)
    return found


def _peak(window: Window, parameter: Parameter) -> float:
    values = rate(window, parameter)[1]
    return float(nanmax(values)) if len(values) else float("nan")


def _untrained(own: list[Parameter], group: int, loss: Learned) -> Found:
    return Found(
        f"The learning rate of parameter group {group} is 0: {counted(len(own), 'weight matrix', 'weight matrices')} "
        f"never change{'s' if len(own) == 1 else ''}, and {loss.outcome}.",
        step=0,
        confidence=0.9,
        sites=tuple(p.name for p in own[:8]),
        remedy="Give the group a learning rate: `optimizer.param_groups["
        f"{group}]['lr'] = 1e-3`. Or leave its parameters out of the optimizer and freeze them.",
        evidence=(Evidence(f"update/{own[0].name}/norm", 0.0, "above 0", None, "size of the updates"),),
    )


def _stands_still(window: Window, own: list[Parameter]) -> bool:
    """Whether weights that start freshly initialised are still where they were at the end."""
    fresh = [p for p in own if starts_fresh(window, p)]
    ways = [_way(window, p) for p in own]
    return len(fresh) >= FRESH * len(own) and bool(nanmax(np.array(ways)) < STILL)


def _way(window: Window, parameter: Parameter) -> float:
    """Total length of the steps of a weight relative to its norm."""
    values = window.get(f"update/{parameter.name}/ratio")[1]
    return float(np.nansum(values)) if np.isfinite(values).any() else np.nan


def _too_slow(window: Window, own: list[Parameter], group: int, slow: float, fast: float, loss: Learned) -> Found:
    site = max((p.name for p in own), key=lambda name: float(nanmax(window.get(f"update/{name}/ratio")[1])))
    return Found(
        f"The learning rate of parameter group {group} is too low: {number(slow, 3)}, {number(fast / slow, 2)} times "
        f"less than that of another group. {counted(len(own), 'weight matrix', 'weight matrices')} stayed as "
        f"initialised, and {loss.outcome}.",
        step=int(loss.steps[0]),
        confidence=0.85,
        sites=tuple(p.name for p in own[:8]),
        remedy=f"Raise the learning rate of the group: `{{'params': ..., 'lr': {one_digit(fast)}}}` "
        f"(now {number(slow, 3)}).",
        evidence=(
            typical(window, f"update/{site}/ratio", "1e-4 to 0.1", "update norm / weight norm, typical"),
            loss.left_evidence(),
        ),
    )


def _too_fast(
    window: Window, own: list[Parameter], group: int, slow: float, fast: float, loss: Learned
) -> Iterator[Found]:
    moved = motion(window)
    if moved is None:
        return
    names = {p.name for p in own}
    rows = {site: row for site, row in zip(moved.sites, moved.ratios, strict=True) if site in names}
    rest = [row for site, row in zip(moved.sites, moved.ratios, strict=True) if site not in names]
    early = {site: float(nanmax(row[:5])) for site, row in rows.items()}
    site = max(early, key=lambda name: early[name], default="")
    if not rest or not site or not early[site] > LARGE or not max(float(nanmax(row[:5])) for row in rest) < LARGE / 3:
        return
    if not (loss.has_diverged or loss.left > UNLEARNED):
        return
    usual = float(nanmedian(rows[site]))
    yield Found(
        f"The learning rate of parameter group {group} is too high: {number(fast, 3)}, {number(fast / slow, 2)} times "
        f"that of another group. An early update of {site} had {percent(early[site])} of the norm of its weight.",
        step=int(moved.steps[0]),
        confidence=0.85,
        sites=tuple(early)[:8],
        remedy=f"Lower the learning rate of the group: `{{'params': ..., 'lr': {one_digit(slow)}}}` "
        f"(now {number(fast, 3)}).",
        evidence=(
            Evidence(f"update/{site}/ratio", usual, "1e-4 to 0.1", None, "update norm / weight norm, median"),
            loss.left_evidence(),
        ),
    )
