"""Pressure along depth: the gradient of each layer over time, and what was inspected of attention and recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.read.run.catalog import Segment
from sonde.read.run.segments import Span
from sonde.read.run.state import RunState
from sonde.read.run.steps import StepFilter
from sonde.read.series.pyramid import cover
from sonde.read.series.raw import RawStats, read_raw
from sonde.run import Run
from sonde.schema.layout import PYRAMID_FACTOR
from sonde.schema.sketch import INF, MAX, MIN, NAN, SUMABS, SUMSQ, Array, N
from sonde.show.web.query import Query
from sonde.show.web.runs import state_of
from sonde.show.web.structure import Structure, structure_of
from sonde.show.web.wire import Reply, binary_reply

MAX_COLUMNS: Final = 1024
DEFAULT_COLUMNS: Final = 240
MAX_CELLS: Final = 150_000
"""Of layers × columns: for very many layers the columns are fewer."""
_FIELDS: Final = frozenset({N, NAN, INF, SUMSQ, SUMABS, MIN, MAX})


def flow(run: Run, query: Query) -> Reply:
    query.only("from", "to", "w")
    state = state_of(run)
    structure = structure_of(state)
    last_step = state.last_step()
    first, last = query.span(last_step)
    last = max(min(last, last_step), first)
    kind = "actgrad" if "actgrad" in structure.kinds() else "grad"
    layers = _layers(structure, kind)
    wanted = min(query.whole("w", 1, MAX_COLUMNS, DEFAULT_COLUMNS), max(MAX_CELLS // max(len(layers), 1), 16))
    width = max(1, -(-(last - first + 1) // wanted))
    level = _level(state, width)
    width = -(-width // PYRAMID_FACTOR**level) * PYRAMID_FACTOR**level
    first = first // width * width
    shape = _Shape(first, last, width, level)
    back = _grid(state, layers, structure, kind, shape)
    forward = _grid(state, layers, structure, "act", shape)
    header = {
        "last_step": last_step,
        "kind": kind,
        "first": first,
        "steps_per_column": width,
        "num_columns": shape.num_columns,
        "layers": [{**layer, "sites": layer["sites"][:64]} for layer in layers],
        "attention": _inspected(state, "attn"),
        "recurrent": _inspected(state, "rnn"),
    }
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        buffers: dict[str, tuple[str, NDArray[Any]]] = {
            "rms": ("f32", _short(np.sqrt(back.sumsq / back.n))),
            "pressure": ("f32", _short(back.sumabs / back.n)),
            "peak": ("f32", _short(np.where(back.is_odd, np.inf, back.peak))),
            "act_rms": ("f32", _short(np.sqrt(forward.sumsq / forward.n))),
            "act_odd": ("u8", forward.is_odd.astype(np.uint8)),
        }
    return binary_reply(header, buffers)


def _short(values: Array) -> NDArray[np.float32]:
    """Ten bits of mantissa are a tenth of a percent, and compress to half the bytes."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded: NDArray[np.float32] = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return rounded


class _Shape:
    """Columns of `width` steps, read from a level of the pyramid."""

    def __init__(self, first: int, last: int, width: int, level: int) -> None:
        self.first, self.last, self.width, self.level = first, last, width, level
        self.num_columns = (last - first) // width + 1


def _level(state: RunState, width: int) -> int:
    level = 0
    while PYRAMID_FACTOR ** (level + 1) <= width and state.segments_of("stats", level + 1):
        level += 1
    return level


def _layers(structure: Structure, kind: str) -> list[dict[str, Any]]:
    """Modules with gradients, from the input to the output."""
    layers: dict[str, dict[str, Any]] = {}
    for number in structure.rows(kind):
        site = structure.sites[number]
        path = site.owner or site.name
        known = {"path": path, "type": site.module_type, "order": structure.depths[number], "sites": []}
        layers.setdefault(path, known)["sites"].append(number)
    return list(layers.values())


class _Sums:
    """Sketches of layers × columns, as far as they are needed; NaN in n where nothing was measured."""

    def __init__(self, num_layers: int, num_columns: int) -> None:
        shape = num_layers, num_columns
        self.n, self.sumsq, self.sumabs, self.peak = (np.zeros(shape) for _ in range(4))
        self.is_odd = np.zeros(shape, np.bool_)

    def add(self, layer: NDArray[np.intp], column: NDArray[np.int64], rows: Array) -> None:
        at = layer, column
        np.add.at(self.n, at, rows[:, N] - rows[:, NAN] - rows[:, INF])
        np.add.at(self.sumsq, at, rows[:, SUMSQ])
        np.add.at(self.sumabs, at, rows[:, SUMABS])
        extremes = np.maximum(np.abs(rows[:, MIN]), np.abs(rows[:, MAX]))
        np.maximum.at(self.peak, at, np.where(np.isfinite(extremes), extremes, 0.0))
        np.logical_or.at(self.is_odd, at, rows[:, NAN] + rows[:, INF] > 0)

    def close(self) -> _Sums:
        nothing = (self.n == 0) & ~self.is_odd
        self.n[self.n == 0] = np.nan
        self.peak[nothing] = np.nan
        return self


def _grid(state: RunState, layers: Sequence[dict[str, Any]], structure: Structure, kind: str, shape: _Shape) -> _Sums:
    """Sketches of a kind, merged over each layer's sites and each column's steps."""
    sums = _Sums(len(layers), shape.num_columns)
    place = {layer["path"]: n for n, layer in enumerate(layers)}
    own = {n: place[p] for n in structure.rows(kind) if (p := _owner(structure, n)) in place}
    if not own:
        return sums.close()
    table = np.zeros(max(own) + 1, np.intp)
    table[list(own)] = list(own.values())
    # File by file: sums need no sorting, and a part of a bucket in each of two files is added like any other row.
    sources = [[segment] for segment in cover(state, shape.level)]
    for segments in [*sources, []]:
        raw = _read(state, np.array(sorted(own)), shape, segments)
        if len(raw):
            column = np.clip((raw.step - shape.first) // shape.width, 0, shape.num_columns - 1)
            sums.add(table[raw.site], column, raw.rows)
    return sums.close()


def _owner(structure: Structure, number: int) -> str:
    site = structure.sites[number]
    return site.owner or site.name


def _read(state: RunState, ids: NDArray[np.int64], shape: _Shape, segments: Sequence[Segment]) -> RawStats:
    return read_raw(
        state,
        ids,
        StepFilter(Span(shape.first, shape.last)),
        _FIELDS,
        with_hist=False,
        segments=segments,
        with_live=not segments,
    )


def _inspected(state: RunState, kind: str) -> list[dict[str, Any]]:
    """Scalars `attn/site/stat` by site."""
    found: dict[str, dict[str, int]] = {}
    for number, name in state.catalog.scalar_names.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == kind:
            found.setdefault(parts[1], {})[parts[2]] = number
    return [{"path": path, "stats": stats} for path, stats in found.items()]
