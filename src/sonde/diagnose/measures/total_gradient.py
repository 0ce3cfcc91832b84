"""The gradient of the whole model as one number per step, as it was before clipping."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.schema.window import Column, Window

NEEDS: Final = ("grad/*/norm_preclip",)


def total_norm(window: Window) -> Column:
    """Euclidean norm over all parameters; empty when gradients were not measured."""
    if "total_norm" not in window.notes:
        grid = window.grid("grad/*/norm_preclip")
        with np.errstate(over="ignore", invalid="ignore"):
            norms = np.sqrt(np.nansum(np.square(grid.values), axis=0)) if len(grid) else np.empty(0)
        window.notes["total_norm"] = (grid.steps, norms)
    known: Column = window.notes["total_norm"]
    return known
