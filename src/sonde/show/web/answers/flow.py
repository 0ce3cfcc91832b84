"""Pressure along the depth: the gradient of each layer over time, and inspections of attention and recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.run import Run
from sonde.schema.sketch import Array
from sonde.show.web.query import Query
from sonde.show.web.structure import Structure, structure_of
from sonde.show.web.wire import Reply, binary_reply

MAX_COLUMNS: Final = 1024
DEFAULT_COLUMNS: Final = 240
MAX_CELLS: Final = 150_000
"""Maximum of layers × columns: with very many layers there are fewer columns."""


def flow(run: Run, query: Query) -> Reply:
    query.only("from", "to", "w")
    structure = structure_of(run)
    last_step = run.last_step
    first, last = query.span(last_step)
    kind = "actgrad" if "actgrad" in structure.kinds() else "grad"
    layers = _layers(structure, kind)
    wanted = min(query.whole("w", 1, MAX_COLUMNS, DEFAULT_COLUMNS), max(MAX_CELLS // max(len(layers), 1), 16))
    back, forward = (
        run.sums(_groups(structure, one, layers), len(layers), range(first, last + 1), columns=wanted)
        for one in (kind, "act")
    )
    header = {
        "last_step": last_step,
        "kind": kind,
        "first": back.columns.first,
        "steps_per_column": back.columns.width,
        "num_columns": back.columns.count,
        "layers": [{**layer, "sites": layer["sites"][:64]} for layer in layers],
        "attention": _inspected(run, "attn"),
        "recurrent": _inspected(run, "rnn"),
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
    """Round to ten bits of mantissa: 0.1 % precision, and half the bytes after compression."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded: NDArray[np.float32] = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return rounded


def _layers(structure: Structure, kind: str) -> list[dict[str, Any]]:
    """Modules with gradients, from the input to the output."""
    layers: dict[str, dict[str, Any]] = {}
    for number in structure.rows(kind):
        site = structure.sites[number]
        path = site.owner or site.name
        known = {"path": path, "type": site.module_type, "order": structure.depths[number], "sites": []}
        layers.setdefault(path, known)["sites"].append(number)
    return list(layers.values())


def _groups(structure: Structure, kind: str, layers: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Sites of a kind by id, with the position of their layer."""
    place = {layer["path"]: n for n, layer in enumerate(layers)}
    owners = {n: structure.sites[n].owner or structure.sites[n].name for n in structure.rows(kind)}
    return {n: place[owner] for n, owner in owners.items() if owner in place}


def _inspected(run: Run, kind: str) -> list[dict[str, Any]]:
    """Scalars `attn/site/stat` by site."""
    found: dict[str, dict[str, int]] = {}
    for number, name in run.catalog.scalar_names.items():
        parts = name.split("/")
        if len(parts) == 3 and parts[0] == kind:
            found.setdefault(parts[1], {})[parts[2]] = number
    return [{"path": path, "stats": stats} for path, stats in found.items()]
