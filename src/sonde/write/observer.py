"""The interface of observers: on the writer thread they receive every record, and add events, findings and facts.

The writer knows nothing else about an observer. It passes every item once, in order, and polls for outputs; an observer
that raises is not called again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from sonde.schema.layout import RunStatus
from sonde.schema.records import Event, Site, SystemSample
from sonde.write.items import Document, Facts, FindingRow, NewAttempt, NewScalar, NewSite, Record

Item = Record | Event | NewSite | NewScalar | NewAttempt | Facts | Document | SystemSample
Output = Event | FindingRow | Facts


class Observer(Protocol):
    """Called on the writer thread only."""

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        """Start, with the state that an earlier session of the run left, and the content of run.json."""

    def on_item(self, item: Item) -> None:
        """Take an accepted item. Must be quick; arrays may be kept and must not be changed."""

    def poll(self, now: float) -> Iterable[Output]:
        """Outputs to add, usually none. Called after every flush."""

    def finish(self, status: RunStatus) -> Iterable[Output]:
        """The last outputs. Called once, after the last item."""


class GuardedObserver:
    """Wraps an observer safely: one that raises is reported once and never called again."""

    def __init__(self, observer: Observer | None, on_failure: Callable[[Exception], None]) -> None:
        self._observer, self._on_failure = observer, on_failure

    def begin(self, sites: Mapping[int, Site], scalars: Mapping[int, str], content: Mapping[str, Any]) -> None:
        self._call(lambda observer: observer.begin(sites, scalars, content))

    def on_item(self, item: Item) -> None:
        if self._observer is not None:
            self._call(lambda observer: observer.on_item(item))

    def poll(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        self._call(lambda observer: outputs.extend(observer.poll(now)))
        return outputs

    def finish(self, status: RunStatus) -> list[Output]:
        outputs: list[Output] = []
        self._call(lambda observer: outputs.extend(observer.finish(status)))
        return outputs

    def _call(self, what: Callable[[Observer], None]) -> None:
        if self._observer is None:
            return
        try:
            what(self._observer)
        except Exception as error:  # noqa: BLE001  observers are foreign code, and recording must continue
            self._observer = None
            self._on_failure(error)
