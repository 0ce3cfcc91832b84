"""How much of a model was seen, and what seeing it cost: sentences out of what the recorder wrote down of itself."""

from __future__ import annotations

from collections.abc import Mapping
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
    return sentences


def _sentence(names: list[Any], noun: str, what: str) -> str:
    named = ", ".join(str(name) or "the model itself" for name in names[:NUM_NAMED])
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} {what}: {named}{more}"


def overhead_sentence(overhead: Any) -> str:
    """What recording took of the step's time.

    >>> overhead_sentence({"host_fraction": 0.0123, "stride": 4})
    'recording took 1.23 % of the time, at every 4th step'
    """
    share = overhead.get("host_fraction") if isinstance(overhead, Mapping) else None
    if not isinstance(share, int | float) or isinstance(share, bool):
        return ""
    stride = overhead.get("stride", 1)
    thinned = f", at every {stride}th step" if isinstance(stride, int) and stride > 1 else ""
    return f"recording took {percent(float(share))} of the time{thinned}"
