"""The answers that an HTML report holds: those of the dashboard's server, asked beforehand, the most telling first."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, Final

from sonde.run import Run
from sonde.show.report.source import OnStage, Report
from sonde.show.web.answering import Answers
from sonde.show.web.query import BadRequestError
from sonde.show.web.runs import RunTable, run_key
from sonde.show.web.wire import read_binary, report_key, to_json

BYTES_PER_TENSOR: Final = 2_500
MIN_BYTES: Final = 400_000
"""Compressed, before base64 adds a third: 148 tensors make about half a megabyte, 2,000 under seven."""
POINTS: Final = 300
HEAT_COLUMNS: Final = 400
MAX_SCALARS: Final = 100
MAX_HIST: Final = 12
LINE_POINTS: Final = 80
_HEAT_WAIT_S: Final = 60.0


def collect(run: Run, report: Report, on_stage: OnStage = lambda _: None) -> dict[str, bytes]:
    """Answers by the name the front-end looks them up under, as many as fit."""
    on_stage("collecting")
    asked = Answers(RunTable([run.path]), can_delete=False)
    try:
        return _collect(asked, run_key(run.path), report)
    finally:
        asked.close()


def _collect(asked: Answers, id: str, report: Report) -> dict[str, bytes]:
    base = f"/api/runs/{id}"
    kept: dict[str, bytes] = {f"{base}/report": to_json(report.as_dict())}
    _detail(asked, base, kept)
    for what in ("sites", "findings", "events", "health?points=400", "system?points=300", "flow?w=200", "snapshots"):
        _keep(asked, f"{base}/{what}", kept)
    sites = json.loads(kept.get(f"{base}/sites", b"{}"))
    findings = json.loads(kept.get(f"{base}/findings", b"{}"))
    room = _room(sites) - sum(_size(body) for body in kept.values())
    for path in _questions(base, sites, findings):
        if room <= 0:
            break
        room -= _keep(asked, path, kept)
    return kept


def _detail(asked: Answers, base: str, kept: dict[str, bytes]) -> None:
    """The run itself. Where things lie on the disk it was made on is nobody's business who gets the file."""
    asked.get(base)
    asked.briefs.wait(60.0)
    detail = json.loads(asked.get(base).body)
    detail["path"] = detail["path"].rpartition("/")[2]
    detail["environment"] = {key: value for key, value in detail["environment"].items() if key != "executable"}
    kept[base] = to_json(detail)


def _keep(asked: Answers, path: str, kept: dict[str, bytes]) -> int:
    """Ask, and keep the answer; gives back how much room it takes. A question that has no answer is left out."""
    key = report_key(path)
    if key in kept:
        return 0
    try:
        body = asked.get(path).body
        if "/heat?" in path and "kind=health" not in path and not read_binary(body)[0]["is_exact"]:
            asked.heats.loader.wait(_HEAT_WAIT_S)
            body = asked.get(path).body
    except BadRequestError:  # nothing of this kind was recorded, or it is damaged, which the warnings say
        return 0
    kept[key] = body
    return _size(body)


def _size(body: bytes) -> int:
    return len(zlib.compress(body, 1))


def _room(sites: dict[str, Any]) -> int:
    """For how many bytes there is room: by the number of tensors of the largest kind."""
    kinds = sites.get("columns", {}).get("kind", [])
    largest = max((kinds.count(kind) for kind in set(kinds)), default=0)
    return max(MIN_BYTES, BYTES_PER_TENSOR * largest)


def _questions(base: str, sites: dict[str, Any], findings: dict[str, Any]) -> Iterator[str]:
    """What the views ask for, in the order in which it would be missed."""
    scalars = [one for one in sites.get("scalars", []) if not one["is_inspection"]][:MAX_SCALARS]
    links = [one["link"] for finding in findings.get("findings", []) for one in finding["evidence"] if one["link"]]
    kinds: list[str] = sites.get("kinds", [])
    stats: dict[str, list[str]] = {kind: [one["name"] for one in sites["stats"].get(kind, [])] for kind in kinds}
    yield from (f"{base}/scalars?i={one['i']}&points={POINTS}" for one in scalars)
    for link in links:
        if "scalar" in link:
            yield f"{base}/scalars?i={link['scalar']}&points={POINTS}"
        else:
            yield f"{base}/lines?i={link['i']}&points={POINTS}&stat={link['stat']}"
    yield f"{base}/heat?kind=health&stat=score&w={HEAT_COLUMNS}"
    for kind in sorted(kinds, key=lambda kind: kind != "grad"):
        yield from (f"{base}/heat?kind={kind}&stat={stat}&w={HEAT_COLUMNS}" for stat in stats[kind][:1])
    yield from _of_tensors(base, sites, stats, [link["i"] for link in links if "i" in link])
    for kind in kinds:
        yield from (f"{base}/heat?kind={kind}&stat={stat}&w={HEAT_COLUMNS}" for stat in stats[kind][1:4])


def _of_tensors(base: str, sites: dict[str, Any], stats: dict[str, list[str]], first: list[int]) -> Iterator[str]:
    """Lines and distributions: of the tensors that findings name all, then of all tensors the main stat."""
    columns = sites.get("columns", {"i": [], "kind": []})
    kind_of = {i: sites["kinds"][kind] for i, kind in zip(columns["i"], columns["kind"], strict=True)}
    named = list(dict.fromkeys(i for i in first if i in kind_of))[:MAX_HIST]
    for i in named:
        yield f"{base}/hist?i={i}&w=120"
        yield from (f"{base}/lines?i={i}&points={LINE_POINTS}&stat={stat}" for stat in stats[kind_of[i]][:6])
    for i in kind_of:
        yield from (f"{base}/lines?i={i}&points={LINE_POINTS}&stat={stat}" for stat in stats[kind_of[i]][:1])
