"""Tensors whose whole is the sum over ranks, read from the addends that each rank has kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sonde.read.run.folder import open_inside
from sonde.read.run.log import list_folder
from sonde.schema.addends import Addends, decode_addends
from sonde.schema.layout import addends_folder
from sonde.schema.records import LOG_HEADER_SIZE, check_log_header
from sonde.schema.sketch import SUMSQ, SUMSQ_RAW, Array
from sonde.schema.specification import sketch


@dataclass
class AddendLogs:
    """The addends of one rank, read again only if a log has grown."""

    run: Path
    records: list[Addends] = field(default_factory=list)
    _seen: list[tuple[str, int]] = field(default_factory=list)

    def refresh(self) -> bool:
        """Returns whether there is anything new."""
        parts = addends_folder(self.run).relative_to(self.run).parts
        names = [name for name in list_folder(self.run, *parts) if name.endswith(".log")]
        found = [(name, os.stat(self.run.joinpath(*parts, name)).st_size) for name in names]  # noqa: PTH116
        if found == self._seen:
            return False
        self._seen, self.records = found, []
        for name in names:
            with open_inside(self.run, *parts, name) as file:
                data = file.read()
            if check_log_header(data[:LOG_HEADER_SIZE]):
                self.records += decode_addends(data, LOG_HEADER_SIZE)
        return True


@dataclass
class Sums:
    """Sketches of sums, by site and step."""

    parts: dict[int, int]
    """The number of addends of each site; sites without all of them at a step have no row there."""
    dtypes: dict[int, str]
    _found: dict[tuple[int, int], dict[int, tuple[NDArray[np.float64], float]]] = field(default_factory=dict)

    def add(self, rank: int, step: int, id: int, values: NDArray[np.float64], factor: float) -> None:
        self._found.setdefault((id, step), {})[rank] = values.astype(np.float64), factor

    def rows(self, wanted: set[int]) -> Iterator[tuple[int, int, Array, Array]]:
        """(site, step, row, histogram) of the sums that are complete."""
        for (id, step), addends in sorted(self._found.items()):
            if id not in wanted or len(addends) != self.parts[id]:
                continue
            total = np.add.reduce([values for values, _ in addends.values()])
            if self.dtypes[id] == "float32":
                total = total.astype(np.float32)  # as the ranks add them
            found = sketch(total)
            factor = min(factor for _, factor in addends.values())
            if factor != 1.0:
                with np.errstate(divide="ignore"):
                    found.rows[SUMSQ_RAW] = np.float64(found.rows[SUMSQ]) / np.float64(factor) ** 2
            yield id, step, found.rows, found.hist
