"""Somebody who looks at what is recorded, on the writer thread, and may have something to add: events, findings, facts.

The writer does not know who it is. It shows every item once, in order, and asks now and then; whoever raises is not
shown anything again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from sonde.schema.layout import RunStatus
from sonde.schema.records import Event, Site, SystemSample
from sonde.write.items import Document, Facts, FindingRow, NewAttempt, NewScalar, NewSite, Record

Shown = Record | Event | NewSite | NewScalar | NewAttempt | Facts | Document | SystemSample
Said = Event | FindingRow | Facts


class Observer(Protocol):
    """Called on the writer thread only."""

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        """What an earlier session of the run left, and the content of run.json."""

    def saw(self, item: Shown) -> None:
        """An item as it was accepted. Must be quick; arrays may be kept and must not be changed."""

    def look(self, now: float) -> Iterable[Said]:
        """Asked after every flush; most often there is nothing to say."""

    def last_look(self, status: RunStatus) -> Iterable[Said]:
        """Asked once, when everything has been shown."""


class GuardedObserver:
    """An observer that cannot hurt: the first time it raises it is told off, and nothing more."""

    def __init__(self, observer: Observer | None, on_failure: Callable[[Exception], None]) -> None:
        self._observer, self._on_failure = observer, on_failure

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        self._call(lambda observer: observer.begin(sites, scalars, content))

    def saw(self, item: Shown) -> None:
        if self._observer is not None:
            self._call(lambda observer: observer.saw(item))

    def look(self, now: float) -> list[Said]:
        said: list[Said] = []
        self._call(lambda observer: said.extend(observer.look(now)))
        return said

    def last_look(self, status: RunStatus) -> list[Said]:
        said: list[Said] = []
        self._call(lambda observer: said.extend(observer.last_look(status)))
        return said

    def _call(self, what: Callable[[Observer], None]) -> None:
        if self._observer is None:
            return
        try:
            what(self._observer)
        except Exception as error:  # noqa: BLE001  whoever observes is not ours, and the recording must go on
            self._observer = None
            self._on_failure(error)
