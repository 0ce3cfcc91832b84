"""Help pages: verbs in groups, one sentence each; options that few users need come last. No text is cut."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from typer.core import TyperCommand, TyperGroup

ADVANCED: Final = "Advanced"
"""Give this as `rich_help_panel` of an option that few users need."""


def first_sentence(text: str) -> str:
    """The first sentence of a help text, without its full stop.

    >>> first_sentence("Delete runs. They are moved to the trash.")
    'Delete runs'
    """
    return re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]


class Verb(TyperCommand):
    """A verb whose help lists advanced options separately."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], ADVANCED: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                sections[title].append(record)
        _write(formatter, sections)


class Verbs(TyperGroup):
    """The command as a whole. `groups` are the titles of its help and the verbs under each."""

    groups: ClassVar[Mapping[str, Sequence[str]]] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for names in self.groups.values() for name in names)
        sections = {
            title: [(name.ljust(width), first_sentence(self.commands[name].help or "")) for name in names]
            for title, names in self.groups.items()
        }
        records = (param.get_help_record(ctx) for param in self.get_params(ctx))
        _write(formatter, {**sections, "Options": [record for record in records if record is not None]})


def _write(formatter: Any, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
