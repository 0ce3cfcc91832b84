"""What the verbs print: JSON for programs on stdout, complaints on stderr, and nothing that a name could smuggle in."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from sonde.errors import UsageError
from sonde.show.term.text import plain


def print_json(value: Any) -> None:
    """One JSON document. Numbers that JSON lacks are the texts "nan", "inf" and "-inf"."""
    from sonde.schema.records import to_json

    sys.stdout.write(json.dumps(json.loads(to_json(value)), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_error(message: str) -> None:
    """An error, as one line."""
    _say("sonde: error: ", message)


def remark(message: str) -> None:
    """Something worth knowing that is not the answer: kept off stdout."""
    _say("", message)


def confirm(question: str) -> None:
    """Go on only after a yes."""
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort:
        raise UsageError("needs confirmation, and there is no terminal to ask on. Add --yes.") from None
    if not is_sure:
        raise typer.Exit(1)


def _say(prefix: str, message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{prefix}{plain(message)}\n")
