"""Consoles for the commands: no markup, no automatic highlighting, no truncation in a pipe."""

from __future__ import annotations

import os
import sys
from typing import Final

from rich.console import Console

PIPE_WIDTH: Final = 200


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr. Rich itself honours NO_COLOR and terminals without colours."""
    stream = sys.stderr if stderr else sys.stdout
    # Without a terminal, rich would cut tables to 80 columns and truncate names that users grep for.
    width = PIPE_WIDTH if not stream.isatty() and "COLUMNS" not in os.environ else None
    return Console(file=stream, markup=False, highlight=False, emoji=False, width=width)


def is_ascii(console: Console) -> bool:
    """Whether the console cannot show block characters."""
    return not console.encoding.lower().startswith("utf")
