"""Numbers, counts and lists as findings print them, so that every sentence writes them the same way."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Final

MAX_LISTED: Final = 3
"""Names spelled out before a list ends in "and 4 more"."""


def number(value: float, digits: int = 2) -> str:
    """A number with few significant digits, in scientific notation when very large or very small.

    >>> [number(x) for x in (0.0316, 1234.5, 2.5e7, 4e-5, 0.0, float("nan"))]
    ['0.032', '1,200', '2.5e7', '4e-5', '0', 'NaN']
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{float(f'{value:.{digits}g}'):,g}"


def attribute(site: str) -> str:
    """The Python expression for a module or parameter of `model`.

    >>> attribute("blocks.2.mlp.0.weight")
    'model.blocks[2].mlp[0].weight'
    """
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", f"model.{site}")


def percent(fraction: float) -> str:
    """A fraction in percent; a tiny one stays a fraction.

    >>> [percent(x) for x in (1.02, 0.25, 0.0123, 0.0, 1e-6)]
    ['102 %', '25 %', '1.2 %', '0 %', '1e-6']
    """
    if 0 < abs(fraction) < 1e-4:
        return number(fraction)
    value = 100 * fraction
    return f"{value:,.0f} %" if 10 <= abs(value) < 1e5 else f"{number(value)} %"


def times(ratio: float) -> str:
    """A ratio, to be followed by what it refers to: "3.2 times the norm", "32 % of the norm".

    >>> [times(3.21), times(0.32)]
    ['3.2 times', '32 % of']
    """
    return f"{number(ratio)} times" if ratio >= 1 else f"{percent(ratio)} of"


def counted(count: int, noun: str, plural: str = "") -> str:
    """A count with its noun.

    >>> [counted(1, "layer"), counted(2, "layer"), counted(1200, "batch", "batches")]
    ['1 layer', '2 layers', '1,200 batches']
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def listed(names: Sequence[str], noun: str = "") -> str:
    """Names in a sentence; a long list is cut short.

    >>> [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c", "d", "e"], "layer")]
    ['a', 'a and b', 'a, b, c and 2 more layers']
    """
    rest = len(names) - MAX_LISTED
    if rest > 0:
        more = f"{rest} more" if not noun else f"{rest} more {noun if rest == 1 else f'{noun}s'}"
        return f"{', '.join(names[:MAX_LISTED])} and {more}"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""


def since(step: int) -> str:
    """The step at which something began, as a phrase.

    >>> [since(0), since(1200)]
    ['from the start', 'since step 1,200']
    """
    return f"since step {step:,}" if step > 0 else "from the start"
