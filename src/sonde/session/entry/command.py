"""Options of `sonde run`, merged with those of its script. Starts no session itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sonde.config import SettingKeywords, Settings
from sonde.session.keywords import watch_keywords
from sonde.write.folder import absolute, check_place

_FACTS: Final = ("name", "tags", "notes")
"""Options that are not settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The arguments of `init` that describe a run, apart from its settings."""

    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    notes: str = ""
    resume: bool | str | os.PathLike[str] = False


class CommandLine:
    """Explicit options take precedence over the script's; otherwise the script decides."""

    def __init__(self, default_project: str, given: Mapping[str, Any]) -> None:
        """Settings are read now: the script may change its folder or its environment before it starts a run."""
        known = Settings.load()
        fixed: SettingKeywords = {"dir": absolute(known.dir)}
        if known.origin("project") == "default":
            fixed["project"] = default_project
        self._settings = known.changed(**fixed)
        self._given = {name: given[name] for name in given if name not in _FACTS}
        if "dir" in self._given:
            self._given["dir"] = absolute(self._given["dir"])
        self.overrides = watch_keywords(Settings(record=given["record"])) if "record" in given else {}
        """Keywords of `watch`, which replace those of the script."""
        check_place(self._settings.changed(**self._given).dir)  # report invalid options before the script runs
        self._described = Described(**{name: given[name] for name in given if name in _FACTS})

    def merged(self, settings: Mapping[str, Any], described: Described) -> tuple[Settings, Described, list[str]]:
        """The settings and facts for a run that the script starts, and the script's values that were overridden."""
        ours, theirs = self._described, described
        merged = replace(
            theirs,
            name=ours.name or theirs.name,
            tags=tuple(dict.fromkeys([*theirs.tags, *ours.tags])),
            notes=ours.notes or theirs.notes,
        )
        said = {**settings, "name": theirs.name, "notes": theirs.notes}
        instead = {**self._given, "name": ours.name, "notes": ours.notes}
        gave_way = [
            f"{name}={said[name]!r} from the script"
            for name in said
            if said[name] and instead.get(name) and str(said[name]) != str(instead[name])
        ]
        return self._settings.changed(**{**settings, **self._given}), merged, gave_way
