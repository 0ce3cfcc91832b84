"""Sentences on where two runs diverge: the step, the site, both values, and what agreed until then."""

from __future__ import annotations

import math
from typing import Final

from sonde.run import Comparison, Divergence
from sonde.show.term.number import counted, number

_PLACES: Final = {
    "param": "the weights of",
    "act": "the output of",
    "actgrad": "the gradient of the output of",
    "grad": "the gradient of",
    "update": "the update of",
    "optim": "the optimizer state of",
    "custom": "the tensor",
    "data": "the data:",
}


def divergence_sentences(found: Comparison) -> list[str]:
    """Describe the first divergence, most important sentence first."""
    first = found.first_divergence
    if first is None:
        if not found.divergence.num_rows:
            return ["The runs have no series in common."]
        return [f"No difference beyond rounding in {counted(found.num_steps, 'common step')}."]
    sentences = [
        f"a and b first differ at step {first.step:,}, in {_place(first)}.",
        f"{first.series if first.kind else first.site}: {_values(first)}.",
        f"{what_agreed(first)} Number of series that differ at this step: {first.num_apart:,}.",
    ]
    if first.unseen:
        missing = " and ".join(first.unseen)
        sentences.append(f"At this step, {missing} were not recorded in both runs; the difference may start there.")
    if first.before > first.tolerance / 30:
        sentences.append(
            f"It may be accumulated rounding: at earlier steps, this series differed by up to {first.before:.1e}."
        )
    return sentences


def _place(first: Divergence) -> str:
    if not first.kind:
        return f'the scalar "{first.site}"'
    kind = f" ({first.module_type})" if first.module_type and first.kind in ("act", "actgrad") else ""
    return f"{_PLACES.get(first.kind, first.kind)} {first.site}{kind}"


def _values(first: Divergence) -> str:
    if not first.tolerance and first.kind == "data":
        return "different batches"
    apart = "" if math.isnan(first.difference) else f", {first.difference:.1e} apart"
    digits = _digits(first)
    rounding = f"rounding in {first.dtype} explains up to {first.tolerance:g}"
    return f"{_shown(first.a, digits)} in a, {_shown(first.b, digits)} in b{apart}; {rounding}"


def _digits(first: Divergence) -> int:
    """The number of digits that shows the two values to be different."""
    if not first.difference or math.isnan(first.difference):
        return 4
    return min(max(4, 2 - math.floor(math.log10(first.difference))), 17)


def _shown(value: float, digits: int) -> str:
    return number(value) if not math.isfinite(value) else f"{value:.{digits}g}"


def what_agreed(first: Divergence) -> str:
    """Describe what comes before the first difference and agrees."""
    steps = "the step before" if first.step == 1 else f"the {first.step:,} steps before"
    if not first.num_before:
        if not first.step:
            return "It is the first value of the first step."
        return f"It is the first value of this step; everything agreed in {steps}."
    series = "The earlier series" if first.num_before == 1 else f"The {first.num_before:,} earlier series"
    agree = f"{series} in this step {'agrees' if first.num_before == 1 else 'agree'}"
    return f"{agree}, and so does everything in {steps}." if first.step else f"{agree}. This is the first step."
