"""How much of a model was seen, and what seeing it cost: sentences out of what the recorder wrote down of itself."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from sonde.show.term.number import percent

NUM_NAMED: Final = 5
_MEANINGS: Final = {
    "modules_never_seen": ("module", "never fired"),
    "parameters_without_gradient": ("parameter", "never had a gradient"),
    "parameters_not_in_optimizer": ("parameter", "not in the optimizer"),
    "unreadable": ("site", "could not be read"),
}


def coverage_sentences(coverage: Mapping[str, Any]) -> list[str]:
    """What was asked for and never seen, a sentence for each kind; empty when all was, or nobody counted.

    >>> coverage_sentences({"modules_never_seen": ["head"]})
    ['1 module never fired: head']
    """
    sentences = []
    for key, (noun, what) in _MEANINGS.items():
        names = coverage.get(key)
        if isinstance(names, list | tuple | Mapping) and names:
            sentences.append(_sentence(list(names), noun, what))
    if coverage.get("captured_steps"):
        sentences.append("the optimizer's step is in a CUDA graph, whose replays nobody sees: sonde.step() reads them")
    return sentences


def _sentence(names: list[Any], noun: str, what: str) -> str:
    named = ", ".join(str(name) or "the model itself" for name in names[:NUM_NAMED])
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} {what}: {named}{more}"


def overhead_share(overhead: Any) -> float | None:
    """What recording took of the time; None where that was not measured.

    >>> overhead_share({"fraction": 0.01, "uncertainty": None}), overhead_share({"fraction": 0.0, "uncertainty": None})
    (0.01, None)
    """
    if not isinstance(overhead, Mapping):
        return None
    share = overhead.get("fraction", overhead.get("host_fraction"))
    if not isinstance(share, int | float) or isinstance(share, bool) or not isfinite(share):
        return None
    # Nothing costs exactly nothing: a run too short to be measured begins with a zero.
    return float(share) if share or overhead.get("uncertainty") is not None else None


def overhead_sentence(overhead: Any) -> str:
    """What recording took of the time, how sure that is, and what was thinned out for it.

    >>> overhead_sentence({"fraction": 0.0103, "uncertainty": 0.002, "stride": {"grads": 1, "optimizer": 11.2}})
    'recording took 1.03 % of the time (give or take 0.2 %), optimizer at one step in 11'
    >>> overhead_sentence({"fraction": 0.0103, "stride": 11, "is_together": True})
    'recording took 1.03 % of the time, at one in 11 of the steps that `when` names'
    >>> overhead_sentence({"fraction": None, "unknown": "every step was recorded"})
    'what recording took is not known: every step was recorded'
    """
    if not isinstance(overhead, Mapping):
        return ""
    if overhead.get("unknown"):
        return f"what recording took is not known: {overhead['unknown']}"
    share, error = overhead_share(overhead), overhead.get("uncertainty")
    if share is None:
        return ""
    known = f" (give or take {percent(float(error))})" if isinstance(error, int | float) else ""
    thinned = _thinned(overhead.get("stride"))
    if thinned and overhead.get("is_together") is True:
        thinned = thinned.replace("one step in", "one in") + " of the steps that `when` names"
    return f"recording took {percent(share)} of the time{known}{thinned}"


def _thinned(strides: Any) -> str:
    if isinstance(strides, int) and strides > 1:
        return f", at one step in {strides}"
    if not isinstance(strides, Mapping):
        return ""
    rare: dict[int, list[str]] = {}
    for kind, stride in strides.items():
        if isinstance(stride, int | float) and stride >= 1.5:
            rare.setdefault(round(stride), []).append(str(kind))
    return "".join(f", {' and '.join(kinds)} at one step in {stride}" for stride, kinds in rare.items())
