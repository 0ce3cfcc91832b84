"""Output of the verbs: JSON on stdout, messages on stderr, with control characters in names removed."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from sonde.errors import UsageError
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
