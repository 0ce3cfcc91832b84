"""Findings with links to their evidence, and health over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from sonde.diagnose.finding import Finding, count_severities
from sonde.run import Run
from sonde.schema.records import Site
from sonde.show.web.answers.lines import DEFAULT_POINTS, MAX_POINTS
from sonde.show.web.caches.diagnoses import Judged, finding_key
from sonde.show.web.line_grid import Line, lines_reply
from sonde.show.web.query import Query
from sonde.show.web.structure import stats_of
from sonde.show.web.wire import Reply, json_reply, number

_LINK_KINDS = ("grad", "act", "param", "update", "actgrad", "optim")


def findings(run: Run, judged: Judged, states: Mapping[str, Mapping[str, Any]], query: Query) -> Reply:
    query.only()
    links = _Links(run)
    keys = [finding_key(finding) for finding in judged.findings]
    places = {key: n for n, key in enumerate(keys)}
    rows = [
        _row(n, key, finding, links)
        | {
            "cause_of": [places[k] for symptom in finding.cause_of if (k := finding_key(symptom)) in places],
            "is_explained": key in judged.explained,
            "state": states.get(key, {}).get("state", "muted" if key in judged.muted else "open"),
        }
        for n, (key, finding) in enumerate(zip(keys, judged.findings, strict=True))
    ]
    return json_reply(
        {
            "last_step": judged.last_step,
            "source": judged.source,
            "findings": rows,
            "counts": count_severities(row["severity"] for row in rows if row["state"] == "open"),
            "num_rules": judged.num_rules,
            "blind": list(judged.blind),
            "failed": list(judged.failed),
            "gaps": list(judged.gaps),
            "is_blind": judged.is_blind,
        }
    )


def _row(n: int, key: str, finding: Finding, links: _Links) -> dict[str, Any]:
    evidence = [
        {**asdict(one), "value": number(one.value), "link": links.series(one.series)} for one in finding.evidence
    ]
    return {
        **finding.as_dict(),
        "n": n,
        "key": key,
        "confidence": number(finding.confidence),
        "links": [links.site(name) for name in finding.sites],
        "evidence": evidence,
    }


class _Links:
    """Maps names in findings to the indices of recorded series."""

    def __init__(self, run: Run) -> None:
        self._series: dict[tuple[str, str], int] = {}
        self._names: dict[str, dict[str, int]] = {}
        for number_, site in run.catalog.sites.items():
            self._series[site.kind, site.name] = number_
            self._names.setdefault(site.name, {})[site.kind] = number_
            if site.owner:
                self._names.setdefault(site.owner, {}).setdefault(site.kind, number_)
        self._scalars = {name: number_ for number_, name in run.catalog.scalar_names.items()}
        self._sites: dict[int, Site] = run.catalog.sites

    def site(self, name: str) -> int | None:
        own = self._names.get(name, {})
        return next((own[kind] for kind in _LINK_KINDS if kind in own), next(iter(own.values()), None))

    def series(self, name: str) -> dict[str, Any] | None:
        if name in self._scalars:
            return {"scalar": self._scalars[name]}
        parts = name.split("/")
        found = self._series.get((parts[0], parts[1])) if len(parts) == 3 else None
        if found is None or parts[2] not in stats_of(self._sites[found].kind):
            return None
        return {"i": found, "stat": parts[2]}


def health(judged: Judged, query: Query) -> Reply:
    query.only("points")
    found = judged.health
    line = Line(-1, "", (found.steps, found.scores[0] if len(found.scores) else np.empty(0)))
    last = found.last
    layers: list[dict[str, Any]] = [
        {"path": name, "score": round(score, 1)}
        for name, row in zip(found.sites[1:], found.scores[1:], strict=False)
        if (score := _last_score(row)) is not None
    ]
    layers.sort(key=lambda layer: float(layer["score"]))
    more = {"last": None if np.isnan(last) else round(float(last), 1), "layers": layers}
    points = query.whole("points", 2, MAX_POINTS, DEFAULT_POINTS)
    # No score before the first measurement is not a bad score.
    measured = ~np.isnan(line.column[1])
    line = Line(-1, "", (line.column[0][measured], line.column[1][measured]))
    return lines_reply([line], (0, max(judged.last_step, 0)), points, last_step=judged.last_step, more=more)


def _last_score(row: Any) -> float | None:
    measured = row[~np.isnan(row)]
    return float(measured[-1]) if len(measured) else None
