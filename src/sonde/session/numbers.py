"""What `log` was given: numbers under their names, nested mappings joined with a slash."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float | np.integer | np.floating | np.bool_):
        return True
    return isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf"


def as_float(value: Any) -> float:
    """An int too large for a float is infinite, as it would be to any tensor.

    >>> as_float(10**400), as_float(True)
    (inf, 1.0)
    """
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def flattened(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += flattened(value, f"{prefix}{name}/")
        else:
            found.append((f"{prefix}{name}", value))
    return found
