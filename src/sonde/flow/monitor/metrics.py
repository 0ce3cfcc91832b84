"""The metrics that a monitor computes: a user's function, the names it applies to, and whether any name does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from sonde.errors import UsageError
from sonde.flow.monitor.metric_store import Aggregation

MetricFunction = Callable[..., Any]
KINDS: Final = (
    "activation", "activation_difference", "parameter", "parameter_difference", "gradient", "gradient_difference",
)  # fmt: skip
_OF_MODULES: Final = ("activation", "activation_difference")
_NUM_SHOWN: Final = 6


@dataclass(frozen=True, slots=True)
class Metric:
    """A user's function, the names it applies to, and how micro-batches are combined."""

    name: str
    function: MetricFunction
    regex: re.Pattern[str]
    aggregation: Aggregation | None = None


class MetricSet:
    """Metrics by kind. A pattern is matched from the start of a name, as by `re.match`: `h.0` selects `h.0.mlp` too."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[Metric]] = {kind: [] for kind in KINDS}
        self._unchecked: list[tuple[str, Metric]] = []

    def __getitem__(self, kind: str) -> list[Metric]:
        return self._by_kind[kind]

    def add(self, kind: str, name: str, function: Any, regex: str, aggregation: Aggregation | None) -> None:
        if not callable(function):
            raise UsageError(f"the metric {name!r} must be a function; got {type(function).__name__}.")
        metric = Metric(name, function, compiled(regex, f"the metric {name!r}"), aggregation)
        self._by_kind[kind].append(metric)
        self._unchecked.append((kind, metric))

    def matching(self, kind: str, name: str) -> Iterator[Metric]:
        return (metric for metric in self._by_kind[kind] if metric.regex.match(name))

    def unmatched(self, modules: Iterable[str], parameters: Iterable[str]) -> list[str]:
        """A message for each metric that applies to no name. Every metric is checked once."""
        checked, self._unchecked = self._unchecked, []
        if not checked:
            return []
        names_of_modules, names_of_parameters = [*modules], [*parameters]
        found = []
        for kind, metric in checked:
            names = names_of_modules if kind in _OF_MODULES else names_of_parameters
            if not any(map(metric.regex.match, names)):
                found.append(_message(kind, metric, names))
        return found


def compiled(regex: str, what: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise UsageError(f"invalid regex for {what}: {error}.") from error


def _message(kind: str, metric: Metric, names: list[str]) -> str:
    what = "module" if kind in _OF_MODULES else "parameter"
    shown = ", ".join(names[:_NUM_SHOWN]) + (", …" if len(names) > _NUM_SHOWN else "")
    return (
        f"sonde: metric_regex={metric.regex.pattern!r} of the {kind} metric {metric.name!r} matches no {what}, so the "
        f"metric is never computed. Names: {shown}."
    )
