"""Shared by batch hashes on every device: the sampled elements, and the bits of a hash. Imports no torch."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

NUM_SAMPLED: Final = 256
NUM_BITS: Final = 53
"""Bits that a float64 represents exactly."""


def strided(values: Any, num: int) -> Any:
    """A sample of a flat array or tensor. The stride shares no factor with its length: every column is included."""
    stride, size = _stride(num)
    return values[: (size - 1) * stride + 1 : stride] if stride > 1 else values


@lru_cache(maxsize=1024)
def _stride(num: int) -> tuple[int, int]:
    size = min(num, NUM_SAMPLED)
    stride = max(num // max(size, 1), 1)
    while stride > 1 and math.gcd(stride, num) > 1:
        stride -= 1
    return stride, size
