"""A list of runs in a notebook: status, loss curve, findings, duration and start of each."""

from __future__ import annotations

import time
from typing import Final

from sonde.run import Run, Runs
from sonde.show.diagnosis import counts_in_words, stored_diagnosis
from sonde.show.notebook.curve import curve
from sonde.show.notebook.style import STATUS_COLOURS, dim, grid, safe
from sonde.show.summary import duration_s, loss_series
from sonde.show.term.number import age, count, counted, duration, number

NUM_RUNS: Final = 20
_TITLES: Final = ("status", "run", "id", "steps", "loss", "", "findings", "took", "started")


def runs_html(runs: Runs) -> str:
    if not runs:
        return "No runs"
    numbers = [title in ("steps", "loss", "took", "started") for title in _TITLES]
    more = len(runs) - NUM_RUNS
    rest = dim(f"and {more:,} more") if more > 0 else ""
    return f"<b>{counted(len(runs), 'run')}</b>{grid(_TITLES, [_row(run) for run in runs[:NUM_RUNS]], numbers)}{rest}"


def _row(run: Run) -> list[str]:
    status, loss = run.status, loss_series(run)
    findings, _ = stored_diagnosis(run)
    return [
        f'<span style="color:{STATUS_COLOURS.get(status, "inherit")}">● {safe(status)}</span>',
        f"<b>{safe(run.project)}/{safe(run.name)}</b>",
        safe(run.id),
        count(run.last_step + 1),
        "–" if loss is None else number(loss.last),
        "" if loss is None else curve((loss.steps, loss.values)),
        "–" if findings is None else counts_in_words(findings),
        duration(duration_s(run)),
        age(time.time() - run.created.timestamp()),
    ]
