"""Errors in the words of the command line: `--dir` where Python says `dir=`, and one format for click's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


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


def click_message(error: Any) -> str:
    """The message of an error that click raised, and the command that helps."""
    message = str(error.format_message()).strip()
    message = re.sub(r", unable to parse .*", "", message.replace("Input should", "it should"))
    sentence = f"{message[:1].lower()}{message[1:]}".rstrip(".")
    path = "sonde" if error.ctx is None else error.ctx.command_path
    return f"{sentence}. See  {path} --help"
