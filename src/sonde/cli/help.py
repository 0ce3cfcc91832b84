"""Help pages: verbs in groups, one sentence each; options that few users need come last. No text is cut.

Values are shown as a person would name them: `--limit N`, not the type that the parser uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from typer.core import TyperCommand, TyperGroup

ADVANCED: Final = "Advanced"
"""Give this as `rich_help_panel` of an option that few users need."""


_TYPE: Final = re.compile(r" <([a-z ]+)(?:\[[a-z]+\])?>")
"""How the parser shows the type of a value: `<str>`, `<list[str]>`, `<int range>`."""
_VALUES: Final = {"int": "N", "int range": "N", "float": "NUMBER", "float range": "NUMBER", "path": "FILE"}
_RANGE: Final = re.compile(r"(?:; |\s*\[)x>=[\d.]+(?=\])\]?")


def first_sentence(text: str) -> str:
    """The first sentence of a help text, without its full stop.

    >>> first_sentence("Delete runs. They are moved to the trash.")
    'Delete runs'
    """
    return re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]


class Verb(TyperCommand):
    """A verb whose help lists advanced options separately."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return [self.options_metavar or "", *map(_usage, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], ADVANCED: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                title = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                sections[title].append(_readable(record, is_argument=is_argument))
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


def _usage(argument: Any) -> str:
    """An argument in the usage line: `RUN`, or `[RUN]` if it may be left out."""
    name = str(argument.metavar or argument.name.upper()).strip("[]").removesuffix("...")
    shown = name if argument.required else f"[{name}]"
    return f"{shown}..." if argument.nargs == -1 else shown


def _readable(record: tuple[str, str], *, is_argument: bool) -> tuple[str, str]:
    """The entry of an option or argument, without the parser's notation for types and ranges.

    >>> _readable(("-n, --limit <int range>", "Maximum number of rows.  [default: 9; x>=1]"), is_argument=False)
    ('-n, --limit N', 'Maximum number of rows.  [default: 9]')
    """
    name, text = record
    shown = _TYPE.sub("" if is_argument else lambda match: f" {_VALUES.get(match[1], 'TEXT')}", name)
    return shown.strip("[]") if is_argument else shown, _RANGE.sub(lambda match: "]" * match[0].startswith(";"), text)


def _write(formatter: Any, sections: Mapping[str, Sequence[tuple[str, str]]]) -> None:
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)
