"""Where two runs part, in sentences: which step, which place, which numbers, and what agreed until then."""

from __future__ import annotations

import math
from typing import Final

from sonde.run import Comparison, Divergence
from sonde.show.term.number import number

_PLACES: Final = {
    "param": "the weights of",
    "act": "the output of",
    "actgrad": "the gradient of the output of",
    "grad": "the gradient of",
    "update": "the update of",
    "optim": "the optimizer's state of",
    "custom": "the tensor",
    "data": "the data:",
}


def divergence_sentences(found: Comparison) -> list[str]:
    """What there is to say, most important first."""
    first = found.first_divergence
    if first is None:
        if not found.divergence.num_rows:
            return ["The runs have no series in common."]
        return [f"No difference beyond rounding in {found.num_steps:,} common steps."]
    sentences = [
        f"a and b differ first at step {first.step:,}, in {_place(first)}.",
        f"{_stat(first)}: {_values(first)}.",
        f"{what_agreed(first)} {first.num_apart} series differ at this step.",
    ]
    if first.unseen:
        sentences.append(f"At this step {' and '.join(first.unseen)} were not recorded in both: it may begin there.")
    if first.before > first.tolerance / 30:
        sentences.append(
            f"It may have grown out of rounding: earlier this series was up to {first.before:.1e} apart, not far below."
        )
    return sentences


def _place(first: Divergence) -> str:
    if not first.kind:
        return f'the scalar "{first.site}"'
    kind = f" ({first.module_type})" if first.module_type and first.kind in ("act", "actgrad") else ""
    return f"{_PLACES.get(first.kind, first.kind)} {first.site}{kind}"


def _stat(first: Divergence) -> str:
    return first.series if first.kind else first.site


def _values(first: Divergence) -> str:
    if not first.tolerance and first.kind == "data":
        return "not the same batch"
    apart = "" if math.isnan(first.difference) else f", {first.difference:.1e} apart"
    digits = _digits(first)
    rounding = f"rounding in {first.dtype} explains {first.tolerance:g}"
    return f"{_shown(first.a, digits)} in a, {_shown(first.b, digits)} in b{apart}; {rounding}"


def _digits(first: Divergence) -> int:
    """Enough to see the two apart."""
    if not first.difference or math.isnan(first.difference):
        return 4
    return min(max(4, 2 - math.floor(math.log10(first.difference))), 17)


def _shown(value: float, digits: int) -> str:
    return number(value) if not math.isfinite(value) else f"{value:.{digits}g}"


def what_agreed(first: Divergence) -> str:
    """How much came before the first difference and was the same."""
    if not first.num_before:
        earlier = f"; everything agreed in the {first.step:,} steps before" if first.step else " and of the run"
        return f"It is the first number of this step{earlier}."
    earlier = f"so did everything in the {first.step:,} steps before" if first.step else "it is the first step"
    return f"The {first.num_before} series that come about before it in this step agree; {earlier}."
