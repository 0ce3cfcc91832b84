"""All exceptions that sonde raises, as a tree. None of them is raised into a training loop that has started.

SondeError
├── UsageError (ValueError)           a request that cannot be carried out as given
│   ├── UnknownNameError              a stat, kind, setting or site that does not exist, with the closest match
│   ├── SettingsError                 a setting with an invalid value or an unknown name
│   ├── NotAModelError (TypeError)    `watch` was given something that is not a model or an optimizer
│   └── SessionError                  a session was used after `finish`, or before one was started
├── RunError                          a run folder cannot be used
│   ├── RunNotFoundError              no run with that name
│   ├── NotARunError                  the folder exists but is not a run
│   ├── RunLockedError                another process is writing to the run
│   ├── FormatError                   the run was written by a newer sonde
│   └── CorruptError                  a checksum does not match, so the data is not shown
├── QueryError                        a SQL query that is invalid or not allowed
└── MissingPackageError (ImportError) an optional package is missing, with the command that installs it
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

from sonde.distribution import install_command

__all__ = [
    "CorruptError",
    "FormatError",
    "MissingPackageError",
    "NotAModelError",
    "NotARunError",
    "QueryError",
    "RunError",
    "RunLockedError",
    "RunNotFoundError",
    "SessionError",
    "SettingsError",
    "SondeError",
    "UnknownNameError",
    "UsageError",
]

_MOST_NAMES: Final = 60
"""An error message lists all names up to this number, beyond it the closest: a large model has thousands of tensors."""


class SondeError(Exception):
    """Base class of all exceptions that sonde raises."""


class UsageError(SondeError, ValueError):
    """A request cannot be carried out as given."""


class UnknownNameError(UsageError):
    """A name does not exist; the message suggests the closest match."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        if len(names) > _MOST_NAMES:
            close = difflib.get_close_matches(name, names, n=10, cutoff=0.2) or names[:10]
            said = f"Closest of {len(names):,}: {', '.join(close)}."
        else:
            said = f"Known: {', '.join(names)}." if names else "There are none."
        super().__init__(f'no {what} "{name}".{nearest(name, names)} {said}')


class SettingsError(UsageError):
    """A setting has an invalid value or an unknown name."""


class NotAModelError(UsageError, TypeError):
    """`watch` was given something that is not a model or an optimizer."""


class SessionError(UsageError):
    """A session was used after `finish`, or before one was started."""


class RunError(SondeError):
    """A run folder cannot be used."""


class RunNotFoundError(RunError):
    """No run has that name."""


class NotARunError(RunError):
    """The folder exists but is not a run."""


class RunLockedError(RunError):
    """Another process is writing to the run."""


class FormatError(RunError):
    """The run was written by a newer sonde."""


class CorruptError(RunError):
    """A checksum does not match, so the data is not shown."""


class QueryError(SondeError):
    """A SQL query is invalid or not allowed."""


class MissingPackageError(SondeError, ImportError):
    """An optional package is missing; the message contains the command that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        is_several = " and " in package or ", " in package
        verb = "are" if is_several else "is"
        super().__init__(f"{purpose} needs {package}, which {verb} not installed. Run:  {install_command(extra)}")


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that a module with lazy imports does not have."""
    names = list(known)
    return AttributeError(
        f"module {module!r} has no attribute {name!r}.{nearest(name, names)} Known: {', '.join(names)}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean "rms"?`, or nothing when no known name is close."""
    names = list(known)
    swapped = [other for other in names if sorted(other) == sorted(name)]  # the most common typo: "rsm" for "rms"
    close = swapped or difflib.get_close_matches(name, names)
    return f' Did you mean "{close[0]}"?' if close else ""


def expectation(message: str) -> str:
    """A message of pydantic about a value, in our words.

    >>> expectation("Input should be a valid integer, unable to parse string as an integer")
    'it should be an integer'
    >>> expectation("Input should be greater than or equal to 1")
    'it should be at least 1'
    """
    said = re.sub(r", unable to (?:parse|interpret) .*", "", message.replace("Input should", "it should"))
    for theirs, ours in _EXPECTED.items():
        said = said.replace(theirs, ours)
    return said


_EXPECTED: Final = {
    "a valid integer": "an integer",
    "a valid boolean": "true or false",
    "a valid ": "a ",
    "greater than or equal to ": "at least ",
    "less than or equal to ": "at most ",
}
"""Phrases of pydantic, and plainer ones."""
