"""Mutes: which findings the user has accepted, where, until when and why. Parsing only; `diagnose` applies them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from typing import Any, Final

MUTE: Final = "mute"
"""A fact in run.json: the mutes that were set when the run was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mute:
    """One line of `mute:` in sonde.yaml."""

    rule: str
    """The name of a rule, or a glob."""
    sites: tuple[str, ...] = ()
    """Globs of sites; empty means everywhere. A finding is muted if all of its sites match."""
    until: str = ""
    """The last day on which it applies, as YYYY-MM-DD; empty means always."""
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.rule:
            raise ValueError("a mute needs a rule, such as `rule: dead_relu`")
        if self.until:
            date.fromisoformat(self.until)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sites": list(self.sites)}

    def is_active(self, today: date) -> bool:
        return not self.until or today <= date.fromisoformat(self.until)


def parse_mutes(value: Any) -> tuple[Mute, ...]:
    """Mutes as given in YAML, as a keyword, or in a variable: `rule` or `rule:sites`, separated by commas.

    >>> [(mute.rule, mute.sites) for mute in parse_mutes("gradient_noise, dead_relu:layers.3.*")]
    [('gradient_noise', ()), ('dead_relu', ('layers.3.*',))]
    >>> parse_mutes([{"rule": "overfitting", "reason": "known"}])[0].reason
    'known'
    """
    if isinstance(value, str):
        text = value.strip()
        value = json.loads(text) if text.startswith(("[", "{")) else [part for part in text.split(",") if part.strip()]
    if isinstance(value, Mute | Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise ValueError("expected a rule, or a list of rules to mute")
    return tuple(map(_parse, value))


def _parse(one: Any) -> Mute:
    if isinstance(one, Mute):
        return one
    if isinstance(one, str):
        rule, _, site = one.strip().partition(":")
        return Mute(rule=rule, sites=(site,) if site else ())
    if not isinstance(one, Mapping):
        raise ValueError(f"{one!r} is not a rule to mute")
    known = [field.name for field in fields(Mute)]
    unknown = [str(key) for key in one if key not in known]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is not part of a mute; known: {', '.join(known)}")
    sites = one.get("sites") or ()
    return Mute(
        rule=str(one.get("rule") or ""),
        sites=(sites,) if isinstance(sites, str) else tuple(map(str, sites)),
        until=str(one.get("until") or ""),
        reason=str(one.get("reason") or ""),
    )
