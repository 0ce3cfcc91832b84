"""The data embedded in an HTML report: precomputed responses of the dashboard's server, most important first."""

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
from sonde.show.web.wire import binary_reply, read_binary, report_key, to_json

BYTES_PER_TENSOR: Final = 2_500
MIN_BYTES: Final = 400_000
"""Compressed size of the data, before base64 adds a third: 148 tensors take about 0.5 MB, 2,000 under 7 MB."""
POINTS: Final = 300
HEAT_COLUMNS: Final = 400
MAX_SCALARS: Final = 100
MAX_NAMED: Final = 12
"""Maximum number of tensors named in findings whose data is kept completely."""
QUANTILES: Final = ("max_abs", "abs_q99", "abs_q75", "abs_q50", "abs_q25", "abs_q01")
LINE_POINTS: Final = 80
_HEAT_WAIT_S: Final = 60.0
_NEVER_MS: Final = 2**31 - 1
MAX_FILE_READS: Final = 5_000
MIN_READS: Final = 40
"""Limits on file reads: series of a tensor are read from every file, so a long run includes them for few tensors."""


def collect(run: Run, report: Report, on_stage: OnStage = lambda _: None) -> dict[str, bytes]:
    """Responses by the key under which the front-end looks them up, as many as fit."""
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
    num_reads = max(MIN_READS, MAX_FILE_READS // max(_num_files(asked, id), 1))
    flow = read_binary(kept[f"{base}/flow"])[0] if f"{base}/flow" in kept else {}
    for path in _questions(base, sites, findings, flow):
        if room <= 0:
            break
        is_read = "/lines?" in path or "/hist?" in path
        if is_read and (report_key(path) in kept or num_reads <= 0):
            continue
        num_reads -= is_read
        room -= _keep(asked, path, kept)
    return kept


def _num_files(asked: Answers, id: str) -> int:
    with asked.table.get(id).open() as run:
        return run.num_files


def _detail(asked: Answers, base: str, kept: dict[str, bytes]) -> None:
    """The run's own facts, without paths: the recipient of the file must not see where it was made."""
    asked.get(base)
    asked.briefs.tasks.wait(60.0)
    detail = json.loads(asked.get(base).body)
    detail["path"] = detail["path"].rpartition("/")[2]
    detail["environment"] = {key: value for key, value in detail["environment"].items() if key != "executable"}
    kept[base] = to_json(detail)


def _keep(asked: Answers, path: str, kept: dict[str, bytes]) -> int:
    """Compute and keep a response; returns its size. A request without a result is left out."""
    key = report_key(path)
    if key in kept:
        return 0
    try:
        body = asked.get(path).body
        if "/heat?" in path and "kind=health" not in path and not read_binary(body)[0]["is_exact"]:
            asked.heats.loader.wait(_HEAT_WAIT_S)
            body = _final(asked.get(path).body)
    except BadRequestError:  # nothing of this kind was recorded, or it is damaged (see the warnings)
        return 0
    kept[key] = body
    return _size(body)


def _final(body: bytes) -> bytes:
    """A heatmap that will not be refined later: merged steps stay merged and are marked as such."""
    header, arrays = read_binary(body)
    types = {name: dtype for name, dtype, *_ in header.pop("buffers")}
    header["retry_ms"] = _NEVER_MS
    return binary_reply(header, {name: (types[name], array) for name, array in arrays.items()}).body


def _size(body: bytes) -> int:
    return len(zlib.compress(body, 1))


def _room(sites: dict[str, Any]) -> int:
    """The byte limit, from the number of tensors of the largest kind."""
    kinds = sites.get("columns", {}).get("kind", [])
    largest = max((kinds.count(kind) for kind in set(kinds)), default=0)
    return max(MIN_BYTES, BYTES_PER_TENSOR * largest)


def _questions(base: str, sites: dict[str, Any], findings: dict[str, Any], flow: dict[str, Any]) -> Iterator[str]:
    """The requests of the views, most important first."""
    tensors = _Tensors(base, sites)
    found = findings.get("findings", [])
    shown = [one["link"] for finding in found for one in finding["evidence"] if one["link"]]
    scalars = [one["i"] for one in sites.get("scalars", []) if not one["is_inspection"]][:MAX_SCALARS]
    inspected = [i for part in ("attention", "recurrent") for one in flow.get(part, ()) for i in one["stats"].values()]
    for i in (*scalars, *(link["scalar"] for link in shown if "scalar" in link), *inspected[:MAX_SCALARS]):
        yield f"{base}/scalars?i={i}&points={POINTS}"
    for link in shown:
        if "i" in link:
            yield tensors.line(link["i"], link["stat"], POINTS)
    yield f"{base}/heat?kind=health&stat=score&w={HEAT_COLUMNS}"
    kinds = sorted(tensors.stats, key=lambda kind: kind != "grad")
    yield from (tensors.heat(kind, stat) for kind in kinds for stat in tensors.stats[kind][:1])
    named = [link["i"] for link in shown if "i" in link] + [i for one in found for i in one["links"] if i is not None]
    for i in list(dict.fromkeys(named))[:MAX_NAMED]:
        yield from tensors.view(i)
    yield from (tensors.line(i, tensors.stats[kind][0]) for i, kind in tensors.kind_of.items() if tensors.stats[kind])
    yield from (tensors.heat(kind, stat) for kind in kinds for stat in tensors.stats[kind][1:4])
    for i in tensors.kind_of:
        yield from tensors.view(i)


class _Tensors:
    """Requests about sites."""

    def __init__(self, base: str, sites: dict[str, Any]) -> None:
        self.base = base
        columns = sites.get("columns", {"i": [], "kind": [], "name": []})
        kinds = sites.get("kinds", [])
        self.kind_of = {i: kinds[kind] for i, kind in zip(columns["i"], columns["kind"], strict=True)}
        self.name_of = dict(zip(columns["i"], columns["name"], strict=True))
        self.stats = {kind: [one["name"] for one in sites["stats"].get(kind, [])] for kind in kinds}
        self.same: dict[str, list[int]] = {}
        for i, name in self.name_of.items():
            self.same.setdefault(name, []).append(i)

    def line(self, i: int, stat: str, points: int = LINE_POINTS) -> str:
        return f"{self.base}/lines?i={i}&points={points}&stat={stat}"

    def heat(self, kind: str, stat: str) -> str:
        return f"{self.base}/heat?kind={kind}&stat={stat}&w={HEAT_COLUMNS}"

    def view(self, i: int) -> Iterator[str]:
        """All requests of the page of one tensor."""
        if i not in self.kind_of:
            return
        for other in self.same[self.name_of[i]]:
            yield from (self.line(other, stat) for stat in self.stats[self.kind_of[other]][:1])
            yield self.line(other, "norm")
        yield f"{self.base}/hist?i={i}&w=120"
        yield from (self.line(i, stat) for stat in QUANTILES if stat in self.stats[self.kind_of[i]])
