"""What the command line of `sonde run` says about runs, merged with what its script says. Begins no session itself."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sonde.config import Settings
from sonde.write.folder import absolute, check_place

_FACTS: Final = ("name", "tags", "notes")
"""Options that are no settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A run as `init` is told of it, besides its settings."""

    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    notes: str = ""
    resume: bool | str | os.PathLike[str] = False


class CommandLine:
    """Options that were given explicitly win over the script's; whatever else the script says holds."""

    def __init__(self, default_project: str, given: Mapping[str, Any]) -> None:
        """Settings are read now: the script may change its folder or its environment before it begins a run."""
        known = Settings.load()
        project = {"project": default_project} if known.origin("project") == "default" else {}
        self._settings = known.changed(dir=absolute(known.dir), **project)
        self._given = {name: given[name] for name in given if name not in _FACTS}
        if "dir" in self._given:
            self._given["dir"] = absolute(self._given["dir"])
        check_place(self._settings.changed(**self._given).dir)  # what is wrong is said before the script runs
        self._described = Described(**{name: given[name] for name in given if name in _FACTS})

    def merged(self, settings: Mapping[str, Any], described: Described) -> tuple[Settings, Described, list[str]]:
        """The settings and facts of a run that the script begins, and which of the script's values gave way."""
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
            f"{name}={said[name]!r} of the script"
            for name in said
            if said[name] and instead.get(name) and str(said[name]) != str(instead[name])
        ]
        return self._settings.changed(**{**settings, **self._given}), merged, gave_way
