"""Output for people: one-line messages, and the views of results that `show` provides.

In a notebook, messages go to stdout: Jupyter shows stderr as a red box, as if the program had failed.
"""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import entry_points
from typing import Any, Self, SupportsIndex, TextIO, TypeVar, overload

from sonde.distribution import DISTRIBUTION
from sonde.errors import UsageError

Result = TypeVar("Result")


def is_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and hasattr(get_shell(), "kernel")


def message_stream() -> TextIO | None:
    """The stream for messages: stderr, or stdout in a notebook; None if it is closed."""
    return sys.stdout if is_notebook() else sys.stderr


def print_line(line: str) -> None:
    """Print a message. If the stream is closed, continue silently."""
    stream = message_stream()
    if stream is None:  # `print` would use stdout instead
        return
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):
        return


def warn(message: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Issue a Python warning; in a notebook print it, because warnings go to stderr."""
    if is_notebook():
        print_line(message)
    else:
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def visible(text: object) -> str:
    r"""One line of visible characters: a name cannot move the cursor or reverse the line.

    >>> visible("a\x1b[31m")
    'a\\x1b[31m'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text))


def load_view(name: str) -> Any:
    """Load a view of a result. Results must not import `show`, so its views are entry points of `sonde.views`."""
    for entry in entry_points(group="sonde.views", name=name):
        return entry.load()
    raise UsageError(
        f'no view "{name}" is installed. Reinstall sonde:  pip install --force-reinstall --no-deps {DISTRIBUTION}'
    )


class Results(list[Result]):
    """A list of results that shows itself; a slice of it does, too."""

    @overload
    def __getitem__(self, key: SupportsIndex) -> Result: ...
    @overload
    def __getitem__(self, key: slice) -> Self: ...
    def __getitem__(self, key: SupportsIndex | slice) -> Result | Self:
        return type(self)(super().__getitem__(key)) if isinstance(key, slice) else super().__getitem__(key)

    def _repr_html_(self) -> str:
        return html_of(self)


def html_of(result: object) -> str:
    """A result as HTML for a notebook."""
    return str(load_view("html")(result))
