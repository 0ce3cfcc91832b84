"""The endpoints of the API: from a path and a query to a reply. Independent of HTTP; also used by the report.

answers = Answers(RunTable([Path("runs")]))
answers.get("/api/runs").body
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from sonde.errors import RunError, SondeError
from sonde.run import Run
from sonde.show.trash import move_to_trash, restore
from sonde.show.web.answers import comparing, flow, judgement, lines, overview, sites, snapshots, tensor
from sonde.show.web.answers.heat import Heats, health_heat
from sonde.show.web.caches.cache import ByteCache
from sonde.show.web.caches.diagnoses import Diagnoses, finding_key
from sonde.show.web.caches.run_summaries import Briefs
from sonde.show.web.caches.throttled import ThrottledAnswers
from sonde.show.web.finding_states import STATES, FindingStates
from sonde.show.web.query import BadRequestError, ConflictError, NotFoundError, Query
from sonde.show.web.runs import Entry, RunTable, run_key
from sonde.show.web.wire import Reply, json_reply

ANSWER_BYTES: Final = 128 << 20
_RUN: Final = re.compile(r"/api/runs/([0-9a-f]{16})(?:/([a-z]+))?", re.ASCII)
_SNAPSHOT: Final = re.compile(r"/api/runs/([0-9a-f]{16})/snapshots/(\d{1,15})(?:/(\d{1,9}))?", re.ASCII)
_STATE: Final = re.compile(r"/api/runs/([0-9a-f]{16})/findings/(\d{1,6})/state", re.ASCII)

Answer = Callable[[Run, Query], Reply]
_PLAIN: Final[dict[str, Answer]] = {
    "sites": sites.sites,
    "scalars": lines.scalars,
    "lines": lines.lines,
    "system": lines.system,
    "cell": tensor.cell,
    "hist": tensor.hist,
    "flow": flow.flow,
    "events": overview.events,
    "snapshots": snapshots.snapshots,
}
"""Endpoints that need only the run. Replies for a run without new data are cached."""
_KEPT: Final = frozenset({"sites", "scalars", "lines", "system", "hist", "flow"})


class BrokenRunError(BadRequestError):
    """The run folder exists but cannot be read."""

    status, code = 422, "broken"


class Answers:
    """All endpoints of the dashboard."""

    def __init__(self, table: RunTable, *, can_delete: bool = True) -> None:
        self.table, self.can_delete = table, can_delete
        self.states = FindingStates()
        self.briefs = Briefs(self.states)
        self.diagnoses = Diagnoses()
        self.comparisons: ThrottledAnswers[Reply] = ThrottledAnswers()
        self.heats = Heats()
        self.cache: ByteCache[Reply] = ByteCache(ANSWER_BYTES)

    def get(self, path: str) -> Reply:
        """Reply to a GET. Raises BadRequestError or a subclass for an invalid request."""
        where, _, text = path.partition("?")
        query = Query(text)
        try:
            return self._get(where, query)
        except (RunError, SondeError) as error:
            raise BrokenRunError(str(error)) from error

    def close(self) -> None:
        self.briefs.tasks.close()
        self.heats.loader.close()

    def _get(self, where: str, query: Query) -> Reply:
        if where == "/api/runs":
            return overview.runs(self.table, self.briefs, query, can_delete=self.can_delete)
        if where == "/api/compare":
            return self._compare(query.only("ids").ids("ids", 2, comparing.MAX_RUNS))
        if where == "/api/compare/heat":
            return self._ratio(query)
        if match := _RUN.fullmatch(where):
            return self._of_run(self.table.get(match[1]), match[2] or "", query)
        if match := _SNAPSHOT.fullmatch(where):
            return self._snapshot(self.table.get(match[1]), int(match[2]), match[3], query)
        raise NotFoundError("unknown endpoint")

    def _of_run(self, entry: Entry, what: str, query: Query) -> Reply:
        with entry.open() as run:
            if what in _KEPT:
                return self._kept(entry, run, what, query, _PLAIN[what])
            if what in _PLAIN:
                return _PLAIN[what](run, query)
            match what:
                case "":
                    return overview.detail(entry, run, self.briefs, query)
                case "findings":
                    states = self.states.of(entry.home, run.id)
                    return judgement.findings(run, self.diagnoses.of(entry, run), states, query)
                case "health":
                    return judgement.health(self.diagnoses.of(entry, run), query)
                case "heat" if query.values.get("kind") == "health":
                    return health_heat(self.diagnoses.of(entry, run), query)
                case "heat":
                    return self._kept(entry, run, what, query, partial(self.heats.heat, entry))
                case _:
                    raise NotFoundError("unknown endpoint")

    def _kept(self, entry: Entry, run: Run, what: str, query: Query, ask: Answer) -> Reply:
        """The cached reply, or a new one if the run has new data."""
        key = entry.id, what, tuple(sorted(query.values.items())), run.revision
        found = self.cache.get(key)
        if found is None:
            found = ask(run, query)
            if found.is_final:
                self.cache.put(key, found, 2 * len(found.body))
        return found

    def _snapshot(self, entry: Entry, step: int, n: str | None, query: Query) -> Reply:
        with entry.open() as run:
            if n is None:
                return snapshots.snapshot(run, step, query)
            return snapshots.image(run, step, int(n), query)

    def _compare(self, ids: Sequence[str]) -> Reply:
        entries = [self.table.get(id) for id in ids]
        with ExitStack() as stack:
            runs = [stack.enter_context(entry.open()) for entry in entries]
            version = tuple(run.revision for run in runs)
            is_moving = any(run.status == "running" for run in runs)
            return self.comparisons.get(
                tuple(ids), version, lambda: comparing.comparison(entries, runs, self.briefs), is_moving=is_moving
            )

    def _ratio(self, query: Query) -> Reply:
        entries = [self.table.get(query.ids(name, 1, 1)[0]) for name in ("a", "b")]
        with ExitStack() as stack:
            return self.heats.ratio(entries, [stack.enter_context(e.open()) for e in entries], query)

    # ------------------------------------------------------------------------------------------------------- changes

    def post(self, path: str, body: Any) -> Reply:
        """Reply to a POST: set the state of a finding, or restore a run from the trash."""
        if match := _STATE.fullmatch(path):
            return self._set_state(self.table.get(match[1]), int(match[2]), body)
        match = _RUN.fullmatch(path)
        if match and match[2] == "restore":
            return self._restore(match[1])
        raise NotFoundError("unknown endpoint")

    def delete(self, path: str) -> Reply:
        match = _RUN.fullmatch(path)
        if match is None or match[2] is not None:
            raise NotFoundError("unknown endpoint")
        self._refuse_changes()
        entry = self.table.get(match[1])
        try:
            with entry.open() as run:
                move_to_trash(run, entry.home)
        except SondeError as error:
            raise ConflictError(str(error)) from error
        except OSError as error:
            raise ConflictError(f"cannot move the run to the trash: {error.strerror}") from error
        self.table.entries(fresh=True)
        return json_reply({"deleted": entry.id})

    def _restore(self, id: str) -> Reply:
        self._refuse_changes()
        found = self.table.trash().get(id)
        if found is None:
            raise NotFoundError("this run is no longer in the trash")
        try:
            back = restore(found)
        except SondeError as error:
            raise ConflictError(str(error)) from error
        except OSError as error:
            raise ConflictError(f"cannot restore the run: {error.strerror}") from error
        self.table.entries(fresh=True)
        return json_reply({"restored": run_key(back)})

    def _refuse_changes(self) -> None:
        if not self.can_delete:
            raise ConflictError("this dashboard was started with --read-only")

    def _set_state(self, entry: Entry, n: int, body: Any) -> Reply:
        state = body.get("state") if isinstance(body, dict) else None
        if state not in STATES:
            raise BadRequestError(f"state must be one of {', '.join(STATES)}")
        self._refuse_changes()
        with entry.open() as run:
            found = self.diagnoses.of(entry, run).findings
            keys = [finding_key(finding) for finding in found]
            key = body.get("key", keys[n] if n < len(keys) else None)
            if key not in keys:
                raise NotFoundError("this finding no longer exists")
            finding = found[keys.index(key)]
            self.states.set(entry.home, run.id, key, state, str(finding.severity))
        return json_reply({"key": key, "state": state})
