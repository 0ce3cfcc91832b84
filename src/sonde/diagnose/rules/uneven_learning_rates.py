"""One parameter group is trained much faster than the others, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax, nanmedian
from sonde.diagnose.measures.loss import Learned, learned
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.measures.motion import NEEDS, motion
from sonde.diagnose.measures.rate import one_digit, rate
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, number, percent
from sonde.schema.window import Window

APART: Final = 50.0
"""Ratio of the learning rates of two groups. Layer-wise decay and faster heads stay within about 30."""
LARGE: Final = 0.3
"""Largest early update relative to the weights; see `lr_too_high`."""
UNLEARNED: Final = 0.3
"""Final loss relative to its start, above which an untrained group is missed."""


@rule(
    needs=NEEDS,
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
    typical = float(nanmedian(rows[site]))
    yield Found(
        f"The learning rate of parameter group {group} is too high: {number(fast, 3)}, {number(fast / slow, 2)} times "
        f"that of another group. An early update of {site} had {percent(early[site])} of the norm of its weight.",
        step=int(moved.steps[0]),
        confidence=0.85,
        sites=tuple(early)[:8],
        remedy=f"Lower the learning rate of the group: `{{'params': ..., 'lr': {one_digit(slow)}}}` "
        f"(now {number(fast, 3)}).",
        evidence=(
            Evidence(f"update/{site}/ratio", typical, "1e-4 to 0.1", None, "update norm / weight norm, median"),
            loss.left_evidence(),
        ),
    )
