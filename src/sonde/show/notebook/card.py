"""A run as a card in a notebook: status, loss, health, findings with their remedies, the weakest layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from sonde.diagnose.finding import Finding
from sonde.diagnose.findings import Findings
from sonde.diagnose.health import grade
from sonde.errors import SondeError
from sonde.run import Run
from sonde.schema.records import flatten
from sonde.show.coverage import coverage_sentences, overhead_sentence
from sonde.show.diagnosis import stored_diagnosis
from sonde.show.notebook.curve import curve
from sonde.show.notebook.finding import NUM_FINDINGS, findings_list, findings_title
from sonde.show.notebook.style import SEVERITY_COLOURS, STATUS_COLOURS, dim, fold, safe
from sonde.show.summary import SeriesSummary, duration_s, largest_gradients, loss_series, scalar_series
from sonde.show.term.number import counted, duration, number
from sonde.show.term.sparkline import sparkline
from sonde.show.web.caches.diagnoses import recorded_findings
from sonde.show.web.caches.run_summaries import MAX_ROWS_TO_JUDGE

NUM_LAYERS: Final = 8
NUM_SCALARS: Final = 20
_UNKNOWN: Final = "Nothing was recorded, or can be read, that the rules could check."


def card(run: Run) -> str:
    """Render the card. Of a damaged run, the readable part is shown and the damage is listed."""
    findings, health, layers, problem, is_known = _judged(run)
    loss = _quietly(lambda: loss_series(run))
    parts = [
        _head(run),
        f'<div class="sonde-top"><div>{_loss(loss)}</div>{_health(health)}</div>',
        *(f'<div class="sonde-warn">⚠ {safe(text)}</div>' for text in dict.fromkeys((*run.warnings, *problem))),
        _findings(findings) if is_known else fold("Findings unknown", dim(_UNKNOWN)),
        fold("Weakest layers", _layers(layers)) if layers else "",
        fold("Largest gradients", _series(_quietly(lambda: largest_gradients(run, num_sites=NUM_LAYERS)) or [])),
        fold("Logged numbers", _series(scalar_series(run))),
        fold("About", _about(run)),
    ]
    return "".join(parts)


def _judged(run: Run) -> tuple[list[Finding], float | None, list[tuple[str, float]], list[str], bool]:
    """Root findings, health, and layers by their newest score; for a large run, the live findings. Also problems, and
    whether there was anything to check."""
    try:
        if run.num_rows > MAX_ROWS_TO_JUDGE:
            return list(recorded_findings(run)), stored_diagnosis(run)[1], [], [], True
        found = run.diagnosis()
    except SondeError as error:
        return [], None, [], [str(error)], False
    found = replace(found, findings=tuple(Findings.of(found)))
    scores = found.health
    last = {site: float(row[-1]) for site, row in zip(scores.sites, scores.scores, strict=True) if site and row.size}
    layers = sorted((item for item in last.items() if item[1] < 99.5), key=lambda item: item[1])
    health = None if np.isnan(scores.last) else scores.last
    return [*found.roots, *found.remarks], health, layers[:NUM_LAYERS], [], not found.is_blind


def _quietly(read: Any) -> Any:
    """The result, or None if the data is damaged; the warnings, which are shown, list the damage."""
    try:
        return read()
    except SondeError:
        return None


def _head(run: Run) -> str:
    status, steps = run.status, run.last_step + 1
    facts = [counted(steps, "step") if steps else "no steps yet", f"in {duration(duration_s(run))}", run.reason]
    shown = "".join(f'<span class="sonde-dim">{safe(fact)}</span>' for fact in facts if fact)
    dot = f'<span style="color:{STATUS_COLOURS.get(status, "inherit")}">● {safe(status)}</span>'
    name = f'<span class="sonde-name">{safe(run.project)}/{safe(run.name)}</span>'
    return f'<div class="sonde-head">{name}{dot}{shown}</div>'


def _loss(loss: SeriesSummary | None) -> str:
    if loss is None:
        return '<span class="sonde-dim">No loss was logged.</span>'
    ends = f"{number(loss.first)} → {number(loss.last)}, lowest {number(loss.min)}"
    bad = f", {loss.num_nonfinite:,} non-finite" if loss.num_nonfinite else ""
    return f'<div class="sonde-dim">{safe(loss.name)}  {safe(ends)}{safe(bad)}</div>{curve((loss.steps, loss.values))}'


def _health(health: float | None) -> str:
    if health is None:
        return '<div class="sonde-dim">Health unknown</div>'
    return f'<div><div class="sonde-dim">health</div><div class="sonde-health">{health:.0f}</div>{_bar(health)}</div>'


def _bar(score: float) -> str:
    colour = {**SEVERITY_COLOURS, "info": "#2a8c5a"}[grade(score)]
    return f'<div class="sonde-bar"><span style="width:{max(score, 2):.0f}%;background:{colour}"></span></div>'


def _findings(findings: Sequence[Finding]) -> str:
    more = len(findings) - NUM_FINDINGS
    shown = findings_list(findings[:NUM_FINDINGS]) + (dim(f"and {more} more: run.findings()") if more > 0 else "")
    return fold(findings_title(findings), shown, is_open=bool(findings))


def _layers(layers: Iterable[tuple[str, float]]) -> str:
    rows = [
        f'<tr><td>{safe(site)}</td><td class="sonde-n">{score:.0f}</td><td style="width:120px">{_bar(score)}</td></tr>'
        for site, score in layers
    ]
    return f"<table>{''.join(rows)}</table>"


def _series(series: Sequence[SeriesSummary]) -> str:
    if not series:
        return ""
    titles = ("", "", "first", "last", "lowest", "highest")
    head = "".join(f'<th class="{"sonde-n" if title else ""} sonde-dim">{title}</th>' for title in titles)
    rows = []
    for one in series[:NUM_SCALARS]:
        numbers = "".join(
            f'<td class="sonde-n">{number(value)}</td>' for value in (one.first, one.last, one.min, one.max)
        )
        rows.append(f"<tr><td>{safe(one.name)}</td><td>{sparkline(one.values, 24)}</td>{numbers}</tr>")
    more = len(series) - NUM_SCALARS
    rest = f'<div class="sonde-dim">and {more} more: run.scalars()</div>' if more > 0 else ""
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{rest}"


def _about(run: Run) -> str:
    manifest = run.manifest
    facts = [
        ("id", run.id),
        ("started", f"{run.created:%Y-%m-%d %H:%M:%S} UTC"),
        ("tags", ", ".join(run.tags)),
        ("notes", run.notes),
        ("command", " ".join(manifest.command)),
        ("overhead", overhead_sentence(manifest.facts.get("overhead")).removeprefix("Recording overhead: ")),
        *(("coverage", sentence) for sentence in coverage_sentences(run.coverage())),
        *flatten(run.config).items(),
        ("folder", run.path),
    ]
    rows = [f'<tr><td class="sonde-dim">{safe(key)}</td><td>{safe(value)}</td></tr>' for key, value in facts if value]
    return f"<table>{''.join(rows)}</table>"
