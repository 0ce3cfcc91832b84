"""Units of a Keras layer that were zero for every input of a batch: found inside the step, judged over several."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from keras import ops
from numpy.typing import NDArray

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
