"""Every exception sonde raises, drawn as a tree. None of them is raised into a training loop that has started.

SondeError
├── UsageError (ValueError)           what was asked cannot be done as asked
│   ├── UnknownNameError              a stat, kind, setting or site that does not exist, with the nearest one that does
│   ├── SettingsError                 a setting with a bad value or of an unknown name
│   ├── NotAModelError (TypeError)    `watch` was given something that is not a model or an optimizer
│   └── SessionError                  a session used after `finish`, or none started
├── RunError                          a run folder cannot be used
│   ├── RunNotFoundError              no run of that name
│   ├── NotARunError                  the folder exists and is not a run
│   ├── RunLockedError                another process writes to it
│   ├── FormatError                   written by a newer sonde
│   └── CorruptError                  a checksum does not match: the data is refused, not shown
├── QueryError                        a SQL query that is wrong, or not allowed
└── MissingPackageError (ImportError) an optional package is needed, with the line that installs it
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

_MOST_NAMES: Final = 60
"""How many names an error lists: a large model has thousands of tensors."""


class SondeError(Exception):
    """The root of everything sonde raises."""


class UsageError(SondeError, ValueError):
    """What was asked cannot be done as asked."""


class UnknownNameError(UsageError):
    """A name that does not exist, with the nearest one that does."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        said = f"Known: {', '.join(names[:_MOST_NAMES])}{more}." if names else "There is none."
        super().__init__(f'no {what} "{name}".{nearest(name, names)} {said}')


class SettingsError(UsageError):
    """A setting with a bad value or of an unknown name."""


class NotAModelError(UsageError, TypeError):
    """`watch` was given something that is not a model or an optimizer."""


class SessionError(UsageError):
    """A session used after `finish`, or none started."""


class RunError(SondeError):
    """A run folder cannot be used."""


class RunNotFoundError(RunError):
    """No run of that name."""


class NotARunError(RunError):
    """The folder exists and is not a run."""


class RunLockedError(RunError):
    """Another process writes to the run."""


class FormatError(RunError):
    """The run was written by a newer sonde."""


class CorruptError(RunError):
    """A checksum does not match: the data is refused, not shown."""


class QueryError(SondeError):
    """A SQL query that is wrong, or not allowed."""


class MissingPackageError(SondeError, ImportError):
    """An optional package is needed, with the line that installs it."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed. Run:  pip install 'sonde[{extra}]'")


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean "rms"?`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known))
    close.sort(key=lambda other: sorted(other) != sorted(name))  # letters swapped is the commonest slip: "rsm" is "rms"
    return f' Did you mean "{close[0]}"?' if close else ""
