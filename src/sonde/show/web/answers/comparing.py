"""Comparison of several runs: config values that differ, last values, and where each diverges from the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sonde.errors import SondeError
from sonde.run import Run, compare
from sonde.schema.losses import shown_scalars, training_loss
from sonde.schema.records import flatten
from sonde.schema.window import ends
from sonde.show.divergence import divergence_sentences, what_agreed
from sonde.show.web.answers.overview import MAX_TEXT, run_row
from sonde.show.web.caches.run_summaries import Briefs
from sonde.show.web.runs import Entry
from sonde.show.web.structure import structure_of
from sonde.show.web.wire import Reply, json_reply, number

MAX_RUNS: Final = 8
MAX_ROWS: Final = 1_500_000
"""Runs with more values than this are compared by config and logged numbers only."""
MAX_SERIES: Final = 500
MAX_METRICS: Final = 500


def comparison(entries: Sequence[Entry], runs: Sequence[Run], briefs: Briefs) -> Reply:
    kinds = [structure_of(run).kinds() for run in runs]
    heads = [entry.head() for entry in entries]
    metrics = _metrics(runs)
    return json_reply(
        {
            "runs": [run_row(e, head, briefs.of(e, head)) for e, head in zip(entries, heads, strict=True)],
            "config": _config(runs),
            "metrics": metrics,
            "loss": training_loss([row["name"] for row in metrics]),
            "divergences": [_divergence(entries[0], runs[0], e, r) for e, r in zip(entries[1:], runs[1:], strict=True)],
            "kinds": [kind for kind in kinds[0] if all(kind in other for other in kinds[1:])],
        }
    )


def _config(runs: Sequence[Run]) -> list[dict[str, Any]]:
    flat = [flatten(run.config) for run in runs]
    keys = sorted(set().union(*flat))
    rows = [(key, [leaves.get(key) for leaves in flat]) for key in keys]
    return [
        {"key": key[:MAX_TEXT], "values": [None if value is None else value[:MAX_TEXT] for value in values]}
        for key, values in rows
        if len(set(values)) > 1
    ]


def _metrics(runs: Sequence[Run]) -> list[dict[str, Any]]:
    columns, ids = [], []
    for run in runs:
        ids_of = {name: i for i, name in run.catalog.require().scalar_names.items()}
        kept = shown_scalars(ids_of)[:MAX_METRICS]
        ids.append({name: ids_of[name] for name in kept})
        columns.append(run.scalar_lines(kept, exact=True))
    rows = []
    for name in sorted(set().union(*ids)):
        found = [ends(own.get(name)) for own in columns]
        rows.append(
            {
                "name": name,
                "last": [None if last is None else number(last) for last, _, _ in found],
                "min": [low for _, low, _ in found],
                "max": [high for _, _, high in found],
                "scalars": [own.get(name) for own in ids],
            }
        )
    return rows


def _divergence(first: Entry, a: Run, entry: Entry, b: Run) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "id": entry.id,
        "first": None,
        "num_steps": min(a.last_step, b.last_step) + 1,
        "series": [],
        "only_a": [],
        "only_b": [],
        "problem": "",
    }
    if max(a.num_rows, b.num_rows) > MAX_ROWS:
        return {
            **empty,
            "problem": "These runs are too long to compare every series here. In the terminal, run: sonde compare A B",
        }
    try:
        found = compare(a, b)
    except SondeError as error:
        return {**empty, "problem": str(error)[:MAX_TEXT]}
    apart = found.divergence.filter(found.divergence["step"].is_valid()).slice(0, MAX_SERIES).to_pylist()
    where = found.first_divergence
    return {
        **empty,
        "first": where
        and {
            "step": where.step,
            "series": where.series,
            "a": number(where.a),
            "b": number(where.b),
            "is_batch": where.kind == "data" and not where.tolerance,
            "reason": " ".join([what_agreed(where), *divergence_sentences(found)[3:]]),
        },
        "num_steps": found.num_steps,
        "series": [
            {"series": row["series"], "step": row["step"], "a": number(row["a"]), "b": number(row["b"])}
            for row in apart
        ],
        "only_a": list(found.only_a[:MAX_SERIES]),
        "only_b": list(found.only_b[:MAX_SERIES]),
    }
