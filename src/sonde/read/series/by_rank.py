"""The records of each rank of a job, not merged: stats of the parts that it holds, and a summary of each."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pyarrow as pa

from sonde.errors import CorruptError, UnknownNameError
from sonde.read.run.state import RunState
from sonde.read.run.steps import ALL_STEPS, StepFilter
from sonde.read.series.scalars import read_scalars
from sonde.read.series.stats import SCHEMA, read_stats
from sonde.schema.losses import training_loss

_SUMMARY = pa.schema(
    [
        ("rank", pa.int64()),
        ("host", pa.string()),
        ("pid", pa.int64()),
        ("status", pa.string()),
        ("last_step", pa.int64()),
        ("silent_s", pa.float64()),
        ("loss", pa.float64()),
        ("grad_norm", pa.float64()),
        ("nonfinite", pa.int64()),
    ]
)


def stats_by_rank(state: RunState, patterns: str | Sequence[str], steps: StepFilter) -> pa.Table:
    """The long table of `read_stats` with a column `rank` in front, one rank after another."""
    tables = []
    for number, own in state.by_rank().items():
        try:
            table = read_stats(own, patterns, steps)
        except UnknownNameError:  # a site of other ranks
            continue
        rank = pa.array([number] * table.num_rows, pa.int64())
        tables.append(pa.table({"rank": rank, **{name: table[name] for name in table.column_names}}))
    if not tables:
        read_stats(state, patterns, steps)  # raises if no rank knows the name
        return SCHEMA.insert(0, pa.field("rank", pa.int64())).empty_table()
    return pa.concat_tables(tables, promote_options="permissive").unify_dictionaries()


def rank_table(state: RunState) -> pa.Table:
    """One row for each rank: where it runs, how far it has come, and its loss and gradient at its last step.

    `silent_s` is the time since its last heartbeat while the run is recorded, `grad_norm` the norm of the parts that it
    holds.
    """
    rows = [_row(number, own) for number, own in sorted(state.by_rank().items())]
    return pa.Table.from_pylist(rows, schema=_SUMMARY)


def _row(number: int, own: RunState) -> dict[str, object]:
    manifest, status, last = own.manifest, own.status().status, own.last_step()
    row: dict[str, object] = {
        "rank": number,
        "host": manifest.host,
        "pid": manifest.pid,
        "status": status,
        "last_step": last,
        "silent_s": max(time.time() - manifest.heartbeat.time, 0.0) if status == "running" else None,
    }
    try:
        grads = read_stats(own, ["grad/*/sumsq", "grad/*/nan", "grad/*/inf"], ALL_STEPS)
        name = training_loss(list(own.catalog.scalar_names.values()))
        losses = None if name is None else read_scalars(own, name, ALL_STEPS)
    except CorruptError:
        return row
    values, stats, steps = (grads[name].to_numpy() for name in ("value", "stat", "step"))
    is_square = stats == "sumsq"
    if is_square.any():
        row["grad_norm"] = float(values[is_square & (steps == steps[is_square].max())].sum() ** 0.5)
    row["nonfinite"] = int(values[~is_square].sum())
    if losses is not None and losses.num_rows:
        row["loss"] = losses["value"][-1].as_py()
    return row
