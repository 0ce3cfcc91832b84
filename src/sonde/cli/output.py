"""Output of the verbs: JSON on stdout, messages on stderr, errors in the words of the command line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Final

import typer

from sonde.errors import UsageError, expectation, nearest
from sonde.show.term.text import plain


def print_json(value: Any) -> None:
    """Print one JSON document. Non-finite numbers become the strings "nan", "inf" and "-inf"."""
    from sonde.schema.records import to_json

    sys.stdout.write(json.dumps(json.loads(to_json(value)), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_error(message: str) -> None:
    """Print an error as one line on stderr."""
    _say("Error: ", message)


def remark(message: str) -> None:
    """Print a message that is not the result, on stderr."""
    _say("", message)


def confirm(question: str) -> None:
    """Ask for confirmation; exit unless the answer is yes."""
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort:
        sys.stderr.write("\n")  # the question ends without one
        raise UsageError("needs confirmation, and there is no terminal to ask on. Add --yes.") from None
    if not is_sure:
        raise typer.Exit(1)


def _say(prefix: str, message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{prefix}{plain(message)}\n")


def in_options(message: str, options: Mapping[str, str]) -> str:
    """The message with an option, or else a variable, in place of each keyword that it names.

    A message names a keyword as `dir=`, followed by a space or the end of a sentence, as "with force=True", or as
    `invalid steps "x"`; code such as `f(dir="x")` stays.

    >>> in_options("Choose another folder with dir= or SONDE_DIR.", {"dir": "--dir"})
    'Choose another folder with --dir or SONDE_DIR.'
    >>> in_options("Choose another folder with dir= or SONDE_DIR.", {})
    'Choose another folder with SONDE_DIR.'
    """
    from sonde.config import ordered_names, variable_of

    words = {**{name: variable_of(name) for name in ordered_names()}, **options}
    names = "|".join(re.escape(name) for name in sorted(words, key=len, reverse=True))
    said = re.sub(rf"(?<![\w.(])({names})=(?=\s|[.,;:)](?:\s|$)|$)", lambda match: words[match[1]], message)
    said = re.sub(r"(?<=\bwith )(\w+)=True\b", lambda match: options.get(match[1], match[0]), said)
    said = re.sub(r'(?<=^invalid )(\w+)(?= ")', lambda match: options.get(match[1], match[0]), said)
    return re.sub(r"\b(SONDE_\w+) or \1\b", r"\1", said)


def click_message(error: Any, verb: str = "") -> str:
    """The message of an error that click raised, in our words, and the command that helps."""
    message = str(error.format_message()).strip()
    value: list[Any] = getattr(error.__cause__, "errors", list)()  # pydantic's, for a value of the wrong type
    given = f' "{value[0]["input"]}"' if value else ""
    for theirs, ours in _CLICK:
        message = re.sub(theirs, ours.replace("VALUE", given.replace("\\", r"\\")), message)
    if possible := getattr(error, "possibilities", None):
        message += nearest(error.option_name, sorted(possible)) or f' Did you mean "{possible[0]}"?'
    sentence = expectation(f"{message[:1].lower()}{message[1:]}").rstrip(".")
    path = f"sonde {verb}".strip() if error.ctx is None else error.ctx.command_path
    return f"{sentence}{'' if sentence.endswith('?') else '.'} See  {path} --help"


_CLICK: Final = (
    (r"^No such option:? '?([^\s']+)'?(?: \(Possible options: .*\))?\.?$", r"no option \1."),
    (r"^Missing (\w+) '(.+)'\.?$", r"missing \1 \2"),
    (r"^Option '(.+)' requires an argument\.?$", r"\1 needs a value"),
    (r"^Option '(.+)' does not take a value\.?$", r"\1 takes no value"),
    (r"^Got unexpected extra arguments?(?:\(s\))? \((.+)\)\.?$", r"unexpected argument: \1"),
    (r"^Invalid value for '([^']+)'(?: / '[^']+')?: ", r"invalid \1VALUE: "),
)
"""Messages of click, and ours."""
