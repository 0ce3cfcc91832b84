"""The gradient norm of the whole model at every step, before clipping."""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.schema.window import Column, Window, noted

NEEDS: Final = ("grad/*/norm_preclip",)


@noted
def total_norm(window: Window) -> Column:
    """Gradient norm over all parameters; empty if gradients were not recorded."""
    grid = window.grid("grad/*/norm_preclip")
    with np.errstate(over="ignore", invalid="ignore"):
        return grid.steps, np.sqrt(np.nansum(np.square(grid.values), axis=0)) if len(grid) else np.empty(0)
