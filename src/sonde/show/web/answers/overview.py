"""The list of runs, and the overview of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from sonde.run import Run
from sonde.schema.layout import lost
from sonde.schema.losses import training_loss, validation_loss, words
from sonde.schema.names import is_inspection
from sonde.schema.records import flatten
from sonde.show.coverage import coverage_sentences, overhead_note, overhead_share
from sonde.show.web.caches.run_summaries import Briefs
from sonde.show.web.query import Query
from sonde.show.web.runs import Entry, Head, RunTable
from sonde.show.web.wire import Reply, json_reply

MAX_CONFIG: Final = 200
MAX_TEXT: Final = 2_000
MAX_EVENTS: Final = 2_000
_YEAR_9999: Final = 253_370_764_800.0


def runs(table: RunTable, briefs: Briefs, query: Query, *, can_delete: bool) -> Reply:
    query.only()
    heads = [(entry, entry.head()) for entry in table.entries().values()]
    rows = [run_row(entry, head, briefs.of(entry, head)) for entry, head in heads]
    rows.sort(key=lambda row: (row["created"], row["name"]), reverse=True)
    trash = [
        {"id": id, "project": one.manifest.project, "name": one.manifest.name, "deleted": one.time}
        for id, one in table.trash().items()
    ]
    return json_reply(
        {
            "runs": rows,
            "trash": trash,
            "num_pending": briefs.tasks.num_pending,
            "places": [str(place) for place in table.places],
            "can_delete": can_delete,
        }
    )


def run_row(entry: Entry, head: Head, brief: dict[str, Any] | None) -> dict[str, Any]:
    manifest = head.manifest
    if manifest is None:
        return {
            "id": entry.id,
            "run_id": "",
            "project": entry.path.parent.name,
            "name": entry.path.name,
            "status": "broken",
            "reason": head.reason[:MAX_TEXT],
            "created": 0.0,
            "ended": None,
            "duration_s": None,
            "last_step": -1,
            "tags": [],
            "notes": "",
            "config": {},
            "brief": None,
        }
    last_step = max(manifest.heartbeat.step, -1 if brief is None else brief["last_step"])
    # The heartbeat is a few seconds old; if the process is gone, the recorded data has the last step.
    reason = lost(last_step) if head.is_lost else head.reason
    began, ended = _time(manifest.created_time), _time(manifest.ended_time or 0.0)
    end = ended or _time(manifest.heartbeat.time)
    return {
        "id": entry.id,
        "run_id": manifest.id,
        "project": manifest.project[:MAX_TEXT],
        "name": manifest.name[:MAX_TEXT],
        "status": head.status,
        "reason": reason[:MAX_TEXT],
        "created": began,
        "ended": ended or None,
        "duration_s": max(end - began, 0.0) if end and began else None,
        "last_step": last_step,
        "tags": [tag[:MAX_TEXT] for tag in manifest.tags[:MAX_CONFIG]],
        "notes": manifest.notes[:MAX_TEXT],
        "config": small_config(manifest.config),
        "brief": brief,
    }


def _time(seconds: float) -> float:
    """Seconds since 1970 if they are a valid date; otherwise 0."""
    return seconds if 0.0 <= seconds < _YEAR_9999 else 0.0


def small_config(config: Mapping[str, Any]) -> dict[str, str]:
    """The first few hundred leaves by dotted path, truncated to a readable length."""
    try:
        leaves = flatten(config)
    except RecursionError:
        return {}
    return {key[:MAX_TEXT]: value[:MAX_TEXT] for key, value in list(leaves.items())[:MAX_CONFIG]}


def detail(entry: Entry, run: Run, briefs: Briefs, query: Query) -> Reply:
    query.only()
    catalog = run.catalog
    manifest = run.manifest
    head = entry.head()
    row = run_row(entry, head, briefs.of(entry, head))
    facts = manifest.facts
    overhead = facts.get("overhead")
    known = overhead if isinstance(overhead, Mapping) else None
    share = overhead_share(overhead)
    names = catalog.scalar_names
    return json_reply(
        {
            **row,
            "reason": run.reason[:MAX_TEXT] or row["reason"],
            "last_step": run.last_step,
            "path": str(run.path),
            "command": list(manifest.command),
            "host": manifest.host,
            "pid": manifest.pid,
            "world_size": manifest.world_size,
            "environment": manifest.environment,
            "git": manifest.git,
            "full_config": manifest.config,
            "overhead": known
            and {
                "fraction": share,
                "uncertainty": known.get("uncertainty"),
                "note": overhead_note(known),
            },
            "coverage": coverage_sentences(run.coverage()),
            "warnings": [warning[:MAX_TEXT] for warning in run.warnings[:MAX_CONFIG]],
            "first_step": min((segment.first_step for segment in catalog.segments), default=0),
            "num_sites": len(catalog.sites),
            "num_scalars": len(names),
            "num_snapshots": run.tensors.num_snapshots,
            "headline": headline(names),
        }
    )


def headline(names: Mapping[int, str]) -> dict[str, int | None]:
    """The scalars to draw first, by their names."""
    ids = {name: i for i, name in names.items()}
    rates = [i for i, name in names.items() if not is_inspection(name) and _is_rate(name)]
    loss, held_out = training_loss(ids), validation_loss(ids)
    return {
        "loss": None if loss is None else ids[loss],
        "val_loss": None if held_out is None else ids[held_out],
        "lr": next(iter(rates), None),
    }


def _is_rate(name: str) -> bool:
    return "lr" in words(name) or "learning_rate" in name.lower()


def events(run: Run, query: Query) -> Reply:
    """The newest events, oldest first."""
    query.only()
    rows = run.events().to_pylist()[-MAX_EVENTS:]
    for row in rows:
        row["message"] = row["message"][:MAX_TEXT]
        row["details"] = _details(row["details"])
    return json_reply({"events": rows})


def _details(text: str) -> Any:
    try:
        return json.loads(text[: 64 * MAX_TEXT])
    except (ValueError, RecursionError):
        return {}
