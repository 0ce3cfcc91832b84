"""The observations of a Keras training step, from tensors to records.

In a compiled step, tensors are kept until they can be sketched together, and their sketches are returned with the
step's numbers; in a torch step, they are sketched at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from keras import ops
from numpy.typing import NDArray

from sonde.adapters.keras.backend import BACKEND, copied
from sonde.adapters.keras.sketches import sketch_all, to_rows
from sonde.budget.compiled_meter import KIND
from sonde.schema.records import Site
from sonde.session.entry.external import put_rows, put_scalars
from sonde.session.session import Session

SITES, UNITS = "sites", "units"


@dataclass
class Collected:
    """Tensors of a step, and their sites."""

    collector: Collector
    sites: list[Site] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    raws: list[tuple[int, Any]] = field(default_factory=list)
    """Gradients before clipping, and the positions of the clipped ones."""
    units: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, sites: Sequence[Site], values: Sequence[Any], raws: Sequence[Any] | None = None) -> None:
        torch, histogram = self.collector.torch, self.collector.histogram
        if torch is not None and sites and sites[0].kind == "act":
            torch.add(sites, values, histogram=histogram)
            return
        if torch is not None:
            torch.add_all(sites, values, raws, histogram=histogram)
            return
        if BACKEND == "torch":
            values = [copied(value) for value in values]  # compiled code may still change them
        self.raws += [(len(self.sites) + i, raw) for i, raw in enumerate(raws or ())]
        self.sites += sites
        self.values += values

    def add_units(self, site: str, value: Any, axis: int) -> None:
        if value.shape[axis] is not None:
            self.units.append((site, is_silent(value, axis)))

    def __bool__(self) -> bool:
        return bool(self.sites or self.units)


class Collector:
    """One for each `fit`."""

    def __init__(self, session: Session, *, is_compiled: bool) -> None:
        self._session = session
        self.histogram = False
        """Whether the current step has histograms. Compiled code samples at every step."""
        self.torch: Any = None
        if not is_compiled:
            from sonde.adapters.keras.torch import TorchSketches

            self.torch = TorchSketches(session)
        self._groups: list[tuple[list[Site], list[int]]] = []
        self._layers: list[list[tuple[str, int]]] = []
        """The sites of the sketches in each group that was ever traced; and the layers of the units."""
        self._silent: dict[str, SilentUnits] = {}

    def begin(self) -> Collected:
        return Collected(self)

    def timed(self) -> AbstractContextManager[Any]:
        """Measures our own work; a clock has no effect in compiled code."""
        return nullcontext() if self.torch is None else self._session.steps.training.governing.meter.span(KIND)

    def begin_step(self, step: int) -> None:
        self.histogram = self._has_histogram(step)

    def sketched(self, collected: Collected) -> dict[str, Any]:
        """A few tensors that a compiled step may return; their names describe their contents."""
        found: dict[str, Any] = {}
        if collected.sites:
            group = (collected.sites, [place for place, _ in collected.raws])
            values = [*collected.values, *(raw for _, raw in collected.raws)]
            found[f"{SITES} {_noted(self._groups, group)}"] = sketch_all(values, self._session.settings.hist_samples)
        if collected.units:
            widths = [(site, int(mask.shape[0])) for site, mask in collected.units]
            found[f"{UNITS} {_noted(self._layers, widths)}"] = ops.concatenate([mask for _, mask in collected.units])
        return found

    def put(self, found: Mapping[str, Any], *, step: int) -> dict[str, Any]:
        """Record the result of `sketched`, once it has been computed; returns the other values."""
        others = {}
        for key, value in found.items():
            kind, _, number = key.partition(" ")
            if kind == SITES and number.isdigit():
                sites, raws = self._groups[int(number)]
                rows: Callable[..., Any] = partial(to_rows, value, raws=raws, histogram=self._has_histogram(step))
                put_rows(self._session.recording, sites, rows, step=step)
            elif kind == UNITS and number.isdigit():
                self._put_units(self._layers[int(number)], value, step)
            else:
                others[key] = value
        if self.torch is not None:
            with self.timed():
                self.torch.hand_over(step)
        return others

    def _has_histogram(self, step: int) -> bool:
        return step % self._session.settings.hist_every == 0

    def _put_units(self, layers: Sequence[tuple[str, int]], value: Any, step: int) -> None:
        masks = Masks(value, [width for _, width in layers])
        shares = {
            f"unit/{site}/dead": LateShare(self._silent.setdefault(site, SilentUnits()), masks, i)
            for i, (site, _) in enumerate(layers)
        }
        put_scalars(self._session.recording, shares, step=step)


def _noted(known: list[Any], group: Any) -> int:
    if group not in known:
        known.append(group)
    return known.index(group)


WINDOW: Final = 8
"""Number of recorded steps after which a silent unit is dead, as in `reduce/inspect/units.py`."""


def is_silent(x: Any, axis: int) -> Any:
    """(units,) of 0 and 1: exactly zero in every row. NaN is not zero."""
    others = [i for i in range(len(x.shape)) if i != axis % len(x.shape)]
    return ops.cast(ops.all(x == 0, axis=others), "uint8")


class SilentUnits:
    """Silent units of one layer, over a window of recorded steps."""

    def __init__(self) -> None:
        self._seen: deque[NDArray[np.bool_]] = deque(maxlen=WINDOW)

    def share(self, silent: NDArray[np.bool_]) -> float:
        """Fraction of units that were silent in every step of the window, including this one."""
        if self._seen and self._seen[-1].shape != silent.shape:
            self._seen.clear()
        self._seen.append(silent)
        return float(np.logical_and.reduce(list(self._seen)).mean())


class Masks:
    """The units of all layers of a step, concatenated; on a device, until they are needed."""

    def __init__(self, masks: Any, widths: Sequence[int]) -> None:
        self._masks, self._ends = masks, np.cumsum(widths)
        self._parts: list[NDArray[np.bool_]] | None = None

    def part(self, index: int) -> NDArray[np.bool_]:
        """The units of one layer. Waits for the device."""
        if self._parts is None:
            self._parts = np.split(ops.convert_to_numpy(self._masks).astype(bool), self._ends[:-1])
            self._masks = None
        return self._parts[index]


class LateShare:
    """The fraction of dead units of one layer, computed on the writer thread, in step order."""

    def __init__(self, units: SilentUnits, masks: Masks, index: int) -> None:
        self._units, self._masks, self._index = units, masks, index

    def __float__(self) -> float:
        return self._units.share(self._masks.part(self._index))
