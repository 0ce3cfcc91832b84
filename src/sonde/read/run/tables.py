"""The small tables of a run: sites, events, system metrics, attempts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sonde.errors import CorruptError, UsageError
from sonde.read.run.catalog import read_rows
from sonde.read.run.ranks import rank_events
from sonde.read.run.schemas import schema_of
from sonde.read.run.sharded import open_state
from sonde.read.run.state import RunState
from sonde.schema.attempts import Attempt
from sonde.schema.checkpoints import RUN_STEP
from sonde.schema.names import Series, current_series, matches, split_pattern
from sonde.schema.records import Site, to_json
from sonde.schema.sketch import Array

_SITES = schema_of(
    "kind:string site:string shape:[int64] dtype:string owner:string module_type:string aliases:[string]"
)
_EVENTS = schema_of("time:double step:int64 type:string severity:string message:string details:string")
_SYSTEM = schema_of("time:double step:int64 name:string value:double")
_CHECKPOINTS = schema_of("id:int64 step:int64 time:double path:string metrics:string")
_ATTEMPTS = pa.schema(
    [
        *schema_of("attempt:int64 first_step:int64 last_step:int64"),
        ("started", pa.timestamp("us", tz="UTC")),
        ("reason", pa.string()),
    ]
)
_FINDINGS = schema_of(
    "id:int64 time:double rule:string severity:string confidence:double step:int64 last_step:int64 sites:string "
    "message:string evidence:string remedy:string"
)


def site_table(state: RunState, pattern: str) -> pa.Table:
    """Sites that match a pattern `kind/site`, in the order in which they were first measured."""
    sites = state.catalog.require().sites
    found = [sites[number] for number in sorted(find_sites(sites, split_pattern(pattern)))]
    rows = [(s.kind, s.name, list(s.shape), s.dtype, s.owner, s.module_type, list(s.aliases)) for s in found]
    return _table(rows, _SITES, "sites")


def find_sites(sites: dict[int, Site], parts: Series) -> list[int]:
    """The ids of the sites that match a pattern."""
    return [n for n, site in sites.items() if matches(parts.kind, site.kind) and matches(parts.site, site.name)]


def event_table(state: RunState) -> pa.Table:
    """Events, oldest first."""
    own = [row[1:] for row in _rows(state, "events", itemgetter(2))]
    found = rank_events(state.run, state.catalog.attempts)
    others = [row[:-1] for row in found if state.is_shown(row[-1], row[1])] + state.events_of_ranks()
    rows = sorted([*own, *others], key=lambda row: row[0]) if others else own
    return _table(rows, _EVENTS, "events")


def system_table(state: RunState) -> pa.Table:
    """System readings, one row per number."""
    return _table(_rows(state, "system_metrics", itemgetter(1)), _SYSTEM, "system_metrics")


def checkpoint_table(state: RunState) -> pa.Table:
    """Saved checkpoints. A checkpoint of step 10 results from steps up to 9, so a run that returns to it keeps it."""
    return _table(_rows(state, "checkpoints", lambda row: _run_step(row) - 1), _CHECKPOINTS, "checkpoints")


def _run_step(row: tuple[Any, ...]) -> int:
    """The step of the run that comes after a checkpoint."""
    try:
        return int(json.loads(row[4])[RUN_STEP])
    except (ValueError, TypeError, KeyError, RecursionError):
        return int(row[1])


def finding_table(state: RunState) -> pa.Table:
    """Live findings, except those based on abandoned steps."""
    rows = [_with_current_names(row) for row in _rows(state, "findings", itemgetter(6))]
    return _table(rows, _FINDINGS, "findings")


def _with_current_names(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A finding with current names of series in its evidence; an invalid one is unchanged."""
    if len(row) != len(_FINDINGS):
        return row
    place = _FINDINGS.get_field_index("evidence")
    return (*row[:place], _current_evidence(row[place]), *row[place + 1 :])


def _current_evidence(text: Any) -> Any:
    try:
        evidence = json.loads(text)
        renamed = [{**one, "series": current_series(one["series"])} for one in evidence]
        return text if renamed == evidence else to_json(renamed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text


def _rows(state: RunState, table: str, step_of: Callable[[tuple[Any, ...]], Any]) -> list[tuple[Any, ...]]:
    """Visible rows, without their attempt; `step_of` returns the step of a row."""
    rows = read_rows(state.run, table, is_live=state.is_held)
    try:
        return [row[:-1] for row in rows if state.is_shown(int(row[-1]), int(step_of(row)))]
    except (ValueError, TypeError) as error:
        raise CorruptError(f"catalog.sqlite: the table {table} is damaged ({error}).") from error


def health_table(steps: NDArray[np.int64], sites: Sequence[str], scores: Array) -> pa.Table:
    """Scores of sites over steps, one row each; steps before a site was first measured are left out."""
    site, step = np.nonzero(~np.isnan(scores))
    codes = pa.array(site.astype(np.int32))
    return pa.table(
        {
            "step": pa.array(steps[step]),
            "site": pa.DictionaryArray.from_arrays(codes, pa.array(list(sites), pa.string())).dictionary_decode(),
            "score": pa.array(scores[site, step]),
        }
    )


def _table(rows: Sequence[tuple[object, ...]], schema: pa.Schema, name: str) -> pa.Table:
    try:
        columns = zip(*rows, strict=True) if rows else [[] for _ in schema]
        return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise CorruptError(f"catalog.sqlite: the table {name} is damaged ({error}).") from error


def attempt_table(state: RunState) -> pa.Table:
    """All attempts in order, including those after the selected one. A run of format 1 and an empty run have one."""
    attempts = state.catalog.require().attempts or (Attempt(number=0, time=state.manifest.created_time),)
    lasts = [open_state(state.run, attempt.number).last_step() for attempt in attempts]
    rows = [
        (attempt.number, attempt.first_step, last, datetime.fromtimestamp(attempt.time, UTC), attempt.reason)
        for attempt, last in zip(attempts, lasts, strict=True)
    ]
    return _table(rows, _ATTEMPTS, "attempts")


def check_attempt(state: RunState, number: int) -> int:
    """Check the number of an attempt; a negative one counts from the last."""
    count = max(len(state.catalog.require().attempts), 1)
    if not -count <= number < count:
        known = "0" if count == 1 else f"0 to {count - 1}"
        raise UsageError(f"no attempt {number} in {state.manifest.project}/{state.manifest.name}. It has: {known}.")
    return number % count
