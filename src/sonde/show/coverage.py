"""Sentences about coverage and overhead, from what the recorder wrote about itself."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Final

from sonde.schema.words import recording_took
from sonde.show.term.number import percent

NUM_NAMED: Final = 5
_MEANINGS: Final = {
    "modules_never_seen": ("module", "never ran"),
    "outputs_unread": ("module", "ran without an output that can be recorded"),
    "parameters_without_gradient": ("parameter", "never had a gradient"),
    "parameters_not_in_optimizer": ("parameter", "not in the optimizer"),
    "unreadable": ("site", "could not be read"),
}


def coverage_sentences(coverage: Mapping[str, Any]) -> list[str]:
    """Describe what was requested but never recorded, one sentence per kind; empty if nothing is missing.

    >>> coverage_sentences({"modules_never_seen": ["head"]})
    ['1 module never ran: head']
    """
    sentences = []
    for key, (noun, what) in _MEANINGS.items():
        names = coverage.get(key)
        if isinstance(names, list | tuple | Mapping) and names:
            sentences.append(_sentence(list(names), noun, what))
    if coverage.get("captured_steps"):
        sentences.append(
            "The optimizer step is captured in a CUDA graph, and replays run no hooks. "
            "Call sonde.step() after each replay to record it."
        )
    return sentences


def _sentence(names: list[Any], noun: str, what: str) -> str:
    named = ", ".join(str(name) or "the model itself" for name in names[:NUM_NAMED])
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} {what}: {named}{more}"


def overhead_share(overhead: Any) -> float | None:
    """The fraction of time spent on recording; None if it was not measured.

    >>> overhead_share({"fraction": 0.01, "uncertainty": None}), overhead_share({"fraction": 0.0, "uncertainty": None})
    (0.01, None)
    """
    if not isinstance(overhead, Mapping):
        return None
    share = overhead.get("fraction", overhead.get("host_fraction"))
    if not isinstance(share, int | float) or isinstance(share, bool) or not isfinite(share):
        return None
    # The overhead is never exactly zero: a zero means that the run was too short to measure it.
    return float(share) if share or overhead.get("uncertainty") is not None else None


def overhead_sentence(overhead: Any) -> str:
    """Describe what recording cost, and what was recorded less often to limit it. Runs of earlier versions have no
    seconds.

    >>> overhead_sentence({"fraction": 0.013, "seconds": 4.1, "elapsed_s": 312.0, "stride": {"optimizer": 11.2}})
    'Recording took 4.1 s of 312 s (1.3 %); optimizer recorded every 11 steps'
    >>> overhead_sentence({"fraction": 0.0103, "uncertainty": 0.002, "stride": {"grads": 1, "optimizer": 11.2}})
    'Recording overhead: 1.03 % ± 0.2 %; optimizer recorded every 11 steps'
    >>> overhead_sentence({"fraction": 0.0103, "stride": 11, "is_together": True})
    'Recording overhead: 1.03 %; recorded at 1 of every 11 steps selected by `when`'
    >>> overhead_sentence({"fraction": None, "unknown": "every step was recorded"})
    'Recording overhead unknown: every step was recorded'
    """
    if isinstance(overhead, Mapping) and overhead.get("unknown"):
        return f"Recording overhead unknown: {overhead_note(overhead)}"
    share = overhead_share(overhead)
    if share is None:
        return ""
    error = overhead.get("uncertainty")
    plus_minus = f" ± {percent(float(error))}" if isinstance(error, int | float) else ""
    took = recording_took(overhead) or f"Recording overhead: {percent(share)}{plus_minus}"
    return "; ".join(filter(None, (took, overhead_note(overhead))))


def overhead_note(overhead: Any) -> str:
    """Why the overhead is unknown, or what was recorded less often to limit it. May be empty.

    >>> overhead_note({"fraction": 0.0103, "stride": {"grads": 1, "optimizer": 11.2}})
    'optimizer recorded every 11 steps'
    """
    if not isinstance(overhead, Mapping):
        return ""
    if overhead.get("unknown"):
        return str(overhead["unknown"])
    stride = overhead.get("stride")
    if overhead.get("is_together") is True and isinstance(stride, int) and stride > 1:
        return f"recorded at 1 of every {stride} steps selected by `when`"
    return _thinned(stride, overhead.get("parts"))


def _thinned(strides: Any, parts: Any) -> str:
    """
    >>> _thinned({"grads": 1.0, "optimizer": 20.0, "activations": 20.0}, {"activations": 4})
    'optimizer and activations (1 of 4 parts of the modules at a time) recorded every 20 steps'
    """
    if isinstance(strides, int) and strides > 1:
        return f"recorded every {strides} steps"
    if not isinstance(strides, Mapping):
        return ""
    rare: dict[int, list[str]] = {}
    for kind, stride in strides.items():
        if isinstance(stride, int | float) and stride >= 1.5:
            rare.setdefault(round(stride), []).append(f"{kind}{_in_parts(parts, kind)}")
    return "; ".join(f"{' and '.join(kinds)} recorded every {stride} steps" for stride, kinds in rare.items())


def _in_parts(parts: Any, kind: Any) -> str:
    num = parts.get(kind) if isinstance(parts, Mapping) else None
    return f" (1 of {num} parts of the modules at a time)" if isinstance(num, int) and num > 1 else ""
