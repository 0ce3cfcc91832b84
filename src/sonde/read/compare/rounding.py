"""Tolerances for rounding: how far two values may differ, by the coarsest dtype they went through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sonde.read.run.state import RunState

TOLERANCES: Final = {"float64": 1e-10, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Relative difference that rounding explains in sums over a tensor of a dtype; 8-bit types count as bfloat16."""

EPSILONS: Final = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Machine epsilon: the gap between 1 and the next number."""


class Tolerance:
    """Tolerances for the series of some runs."""

    def __init__(self, states: Iterable[RunState], given: float | None) -> None:
        self.given = given
        self._dtypes: dict[tuple[str, str], str] = {}
        self.coarsest = ""
        types = []
        for state in states:
            types.append({site.dtype for site in state.catalog.require().sites.values() if "float" in site.dtype})
            for site in state.catalog.require().sites.values():
                if "float" in site.dtype:
                    key = (site.kind, site.name)
                    self._dtypes[key] = _coarser(self._dtypes.get(key, ""), site.dtype)
                    self.coarsest = _coarser(self.coarsest, site.dtype)
        self.is_mixed = any(own != types[0] for own in types)
        """Whether the runs used different dtypes, in which case the bits of the same batch also differ."""

    def of(self, kind: str, site: str) -> tuple[float, str]:
        """(tolerance, dtype) of a series. Gradients and updates go through every dtype, activations through one."""
        dtype = self._dtypes.get((kind, site), self.coarsest) if kind == "act" else self.coarsest
        return (tolerance_of(dtype) if self.given is None else self.given), dtype or "float32"

    def of_update(self) -> float:
        """Tolerance for an update as a fraction of the weight, which only moves in steps of its spacing."""
        return EPSILONS.get(self.coarsest, EPSILONS["float32"]) if self.given is None else 0.0


def tolerance_of(dtype: str) -> float:
    """Tolerance for a dtype; that of float32 if it is unknown.

    >>> tolerance_of("bfloat16")
    0.03
    """
    return TOLERANCES["bfloat16"] if dtype.startswith("float8") else TOLERANCES.get(dtype, TOLERANCES["float32"])


def _coarser(a: str, b: str) -> str:
    return b if not a or tolerance_of(b) > tolerance_of(a) else a
