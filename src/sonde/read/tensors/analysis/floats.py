"""Conversion of tensors of any dtype to float64, which the analyses use."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.schema.sketch import Array


def as_float64(tensor: NDArray[Any]) -> Array:
    """Convert to float64; complex numbers become two along a last axis, which keeps norms, distances and dot products.

    >>> import numpy as np
    >>> as_float64(np.array([3 + 4j])).tolist()
    [[3.0, 4.0]]
    """
    values = np.asarray(tensor)
    if values.dtype.kind == "c":
        return np.stack((values.real, values.imag), axis=-1).astype(np.float64)
    return values.astype(np.float64)
