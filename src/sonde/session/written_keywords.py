"""The keywords of `watch` as text: from `sonde.yaml`, variables, and the options of `sonde run`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, cast

from sonde.config import RecordSettings, Settings
from sonde.errors import UsageError
from sonde.probe.schedule import parse_schedule
from sonde.session.keywords import WatchKeywords
from sonde.session.snapshot_plan import Snapshots

IN_PYTHON_ONLY: Final = frozenset({"budget", "prefix", "log", "log_freq", "criterion", "idx", "log_graph"})
"""Keywords of `watch` that `record` does not have: a setting of the same name, the name of one model of several, and
those of `wandb.watch`."""
_PLAIN: Final = ("sites", "mirror")


def watch_keywords(settings: Settings) -> WatchKeywords:
    """The setting `record` as keywords of `watch`. An invalid value raises here."""
    found: dict[str, Any] = {}
    for name in RecordSettings.model_fields:
        value = getattr(settings.record, name)
        if value is not None:
            found[name] = value if name in _PLAIN else _parsed(name, value, f"record.{name}")
    return cast(WatchKeywords, found)


def _parsed(name: str, value: Any, label: str) -> Any:
    if name == "snapshots" and isinstance(value, Mapping):
        return _snapshots(value)
    if not isinstance(value, str) or (name == "activations" and value == "in-graph"):
        return value
    try:
        return parse_schedule(value)
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from None


def _snapshots(given: Mapping[str, Any]) -> Snapshots:
    known = [field.name for field in fields(Snapshots) if field.name != "probe"]
    for name in given:
        if name not in known:
            raise UsageError(f'record.snapshots has no "{name}". Known: {", ".join(known)}.')
    when = {"when": _parsed("when", given["when"], "record.snapshots.when")} if "when" in given else {}
    return Snapshots(**{**given, **when})
