"""The tables for SQL: our own, and the five of LayerClaw over the same data. Loaded only when used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import QueryError
from sonde.read.run.checkpoints import ELSEWHERE, run_checkpoints
from sonde.read.run.state import RunState
from sonde.read.run.steps import ALL_STEPS
from sonde.read.run.tables import event_table, find_sites, finding_table, site_table, system_table
from sonde.read.series.raw import read_raw
from sonde.read.series.scalars import read_scalars
from sonde.read.series.stats import wide_table
from sonde.read.tensors.stores import FolderTensorStore, open_tensor_store, upload_state
from sonde.schema.joined import JOINED
from sonde.schema.names import Series
from sonde.schema.old_names import STATS as OLD_STATS
from sonde.schema.records import to_json
from sonde.schema.sketch import FIELDS, N
from sonde.schema.stats import STATS

MAX_TABLE_BYTES: Final = 4 << 30
_KEYS: Final = ("step", "kind", "site")
STAT_COLUMNS: Final = tuple(dict.fromkeys((*FIELDS, *STATS, *JOINED)))


@dataclass(frozen=True, slots=True)
class View:
    """A table: its columns, and a function that reads the requested ones."""

    name: str
    columns: tuple[str, ...]
    load: Callable[[RunState, set[str]], pa.Table]
    old_columns: Mapping[str, str] = field(default_factory=dict)
    """Earlier names of columns, which a query may still use; `*` leaves them out."""


def _stats(state: RunState, columns: set[str]) -> pa.Table:
    old = {name: new for name, new in OLD_STATS.items() if name in columns}
    wanted = [name for name in STAT_COLUMNS if name in columns or name in old.values()]
    _refuse_too_large(state, len(wanted))
    table = wide_table(state, sorted(state.catalog.sites), wanted)
    for name, new in old.items():
        table = table.append_column(name, table[new])
    return table


def _refuse_too_large(state: RunState, num_columns: int) -> None:
    num_rows = sum(segment.num_rows for segment in state.segments_of("stats"))
    if num_rows * (16 + 8 * num_columns) > MAX_TABLE_BYTES:
        raise QueryError(
            f"{num_rows:,} rows of {num_columns} stats do not fit in {MAX_TABLE_BYTES >> 30} GiB. Select fewer columns "
            "instead of *, or read some series with  run.stats(pattern, steps=…)"
        )


def _runs(state: RunState, columns: set[str]) -> pa.Table:
    manifest, status = state.manifest, state.status()
    return pa.table(
        {
            "run_id": [manifest.id],
            "project_name": [manifest.project],
            "run_name": [manifest.name],
            "start_time": [manifest.created_time],
            "end_time": pa.array([manifest.ended_time], pa.float64()),
            "status": [status.status],
            "reason": [status.reason],
            "config": [to_json(dict(manifest.config))],
            "tags": pa.array([list(manifest.tags)], pa.list_(pa.string())),
            "notes": [manifest.notes],
            "total_steps": [state.last_step() + 1],
            "last_step": [state.last_step()],
            "path": [str(state.run)],
        }
    )


def _checkpoints(state: RunState, columns: set[str]) -> pa.Table:
    """One row per step with a scalar, a gradient or tensors, as in LayerClaw; `sample_path` locates its tensors."""
    scalars = read_scalars(state, "*", ALL_STEPS)
    metrics: dict[int, dict[str, float]] = {}
    times: dict[int, float] = {}
    for row in zip(*(scalars[name].to_pylist() for name in ("step", "name", "value", "time")), strict=True):
        metrics.setdefault(row[0], {})[row[1]] = row[2]
        times[row[0]] = row[3]
    paths = sample_paths(state)
    steps = sorted({*metrics, *paths, *_grad_steps(state).tolist()})
    return pa.table(
        {
            "checkpoint_id": pa.array(steps, pa.int64()),
            "run_id": pa.array([state.manifest.id] * len(steps), pa.string()),
            "step": pa.array(steps, pa.int64()),
            "timestamp": pa.array([times.get(step) for step in steps], pa.float64()),
            "metrics": pa.array([to_json(metrics.get(step, {})) for step in steps], pa.string()),
            "sample_path": pa.array([paths.get(step) for step in steps], pa.string()),
        }
    )


def _checkpoint_ids(state: RunState, steps: list[int], columns: set[str]) -> pa.Array:
    """The row of `checkpoints` for each of these steps; null if there is none."""
    if "checkpoint_id" not in columns:
        return pa.nulls(len(steps), pa.int64())
    known = {*read_scalars(state, "*", ALL_STEPS)["step"].to_pylist(), *_grad_steps(state).tolist()}
    known |= sample_paths(state).keys()
    return pa.array([step if step in known else None for step in steps], pa.int64())


def _grad_ids(state: RunState) -> list[int]:
    return sorted(find_sites(state.catalog.sites, Series("grad", "*", "*")))


def _grad_steps(state: RunState) -> NDArray[np.int64]:
    raw = read_raw(state, np.array(_grad_ids(state), np.int64), ALL_STEPS, frozenset({N}), with_hist=False)
    return np.unique(raw.step)


def _gradient_stats(state: RunState, columns: set[str]) -> pa.Table:
    names = ("norm", "mean", "std", "max", "min", "zero", "nan", "inf")
    table = wide_table(state, _grad_ids(state), list(names))
    counts = {"num_zeros": "zero", "num_nans": "nan", "num_infs": "inf"}
    return pa.table(
        {
            "id": pa.array(np.arange(table.num_rows)),
            "checkpoint_id": table["step"],
            "layer_name": table["site"],
            **{name: table[name] for name in names[:5]},
            **{name: table[source].cast(pa.int64()) for name, source in counts.items()},
        }
    )


def _system_metrics(state: RunState, columns: set[str]) -> pa.Table:
    """One row per reading, GPUs as JSON."""
    readings: dict[tuple[float, int], dict[str, float]] = {}
    for row in system_table(state).to_pylist():
        readings.setdefault((row["time"], row["step"]), {})[row["name"]] = row["value"]
    values = list(readings.values())
    return pa.table(
        {
            "id": pa.array(range(len(values)), pa.int64()),
            "checkpoint_id": _checkpoint_ids(state, [step for _, step in readings], columns),
            "timestamp": pa.array([time for time, _ in readings], pa.float64()),
            "cpu_percent": pa.array([value.get("cpu_percent") for value in values], pa.float64()),
            "memory_percent": pa.array([value.get("memory_percent") for value in values], pa.float64()),
            "gpu_metrics": pa.array([to_json(_gpus(value.items())) for value in values], pa.string()),
        }
    )


def _gpus(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    return {name: value for name, value in items if name.startswith("gpu")}


def _anomalies(state: RunState, columns: set[str]) -> pa.Table:
    rows = finding_table(state).to_pylist()
    details = [to_json({key: _parsed(row[key]) for key in ("message", "sites", "evidence", "remedy")}) for row in rows]
    return pa.table(
        {
            "id": pa.array([row["id"] for row in rows], pa.int64()),
            "run_id": pa.array([state.manifest.id] * len(rows), pa.string()),
            "checkpoint_id": _checkpoint_ids(state, [row["step"] for row in rows], columns),
            "step": pa.array([row["step"] for row in rows], pa.int64()),
            "anomaly_type": pa.array([row["rule"] for row in rows], pa.string()),
            "severity": pa.array([row["severity"] for row in rows], pa.string()),
            "details": pa.array(details, pa.string()),
        }
    )


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


VIEWS: Final[dict[str, View]] = {
    view.name: view
    for view in (
        View("stats", (*_KEYS, *STAT_COLUMNS), _stats, OLD_STATS),
        View("scalars", ("step", "name", "value", "time"), lambda state, _: read_scalars(state, "*", ALL_STEPS)),
        View("events", ("time", "step", "type", "severity", "message", "details"), lambda state, _: event_table(state)),
        View(
            "sites",
            ("kind", "site", "shape", "dtype", "owner", "module_type", "aliases"),
            lambda state, _: site_table(state, "*"),
        ),
        View("system", ("time", "step", "name", "value"), lambda state, _: system_table(state)),
        View(
            "runs",
            (
                *("run_id", "project_name", "run_name", "start_time", "end_time", "status", "reason", "config", "tags"),
                *("notes", "total_steps", "last_step", "path"),
            ),
            _runs,
        ),
        View("checkpoints", ("checkpoint_id", "run_id", "step", "timestamp", "metrics", "sample_path"), _checkpoints),
        View(
            "gradient_stats",
            (
                *("id", "checkpoint_id", "layer_name", "norm", "mean", "std", "max", "min"),
                *("num_zeros", "num_nans", "num_infs"),
            ),
            _gradient_stats,
        ),
        View(
            "system_metrics",
            ("id", "checkpoint_id", "timestamp", "cpu_percent", "memory_percent", "gpu_metrics"),
            _system_metrics,
        ),
        View(
            "anomalies",
            ("id", "run_id", "checkpoint_id", "step", "anomaly_type", "severity", "details"),
            _anomalies,
        ),
    )
}


def sample_paths(state: RunState) -> dict[int, str]:
    """Paths by step. A snapshot that is only in a repository is named by the repository's URL, which is not opened."""
    return {**_checkpoint_paths(state), **_snapshot_paths(state)}


def _checkpoint_paths(state: RunState) -> dict[int, str]:
    found = run_checkpoints(state)
    return {c.step: str(c.path) for c in found if c.problem in ("", ELSEWHERE) and c.path.exists()}


def _snapshot_paths(state: RunState) -> dict[int, str]:
    run, upload, store = state.run, upload_state(state.run), open_tensor_store(state.run, attempt=state.view)
    far = "" if upload is None else (upload.url if "://" in upload.url else str(run / upload.url))
    places = [store.place(step) for step in store.steps]
    here = {place.step: FolderTensorStore(run, attempt=place.attempt).path(place.step) for place in places}
    return {step: str(path) if path.exists() else far for step, path in here.items()}
