"""How much of a model was seen, and what seeing it cost: sentences out of what the recorder wrote down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.show.term.number import percent

NUM_NAMED: Final = 5


def coverage_sentence(coverage: Any) -> str:
    """Which sites never fired; empty when all did, or nobody counted.

    >>> coverage_sentence({"never_fired": ["act/head"]})
    '1 site never fired: act/head'
    """
    never = coverage.get("never_fired") if isinstance(coverage, Mapping) else None
    if not isinstance(never, list | tuple) or not never:
        return ""
    named = ", ".join(map(str, never[:NUM_NAMED]))
    more = f" and {len(never) - NUM_NAMED} more" if len(never) > NUM_NAMED else ""
    return f"{len(never)} site{'' if len(never) == 1 else 's'} never fired: {named}{more}"


def overhead_sentence(overhead: Any) -> str:
    """What recording took of the step's time.

    >>> overhead_sentence({"share": 0.0123})
    'recording took 1.23 % of the time'
    """
    share = overhead.get("share") if isinstance(overhead, Mapping) else overhead
    if not isinstance(share, int | float) or isinstance(share, bool):
        return ""
    return f"recording took {percent(float(share))} of the time"
