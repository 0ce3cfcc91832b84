"""States of findings (acknowledged, muted), stored in one small file in the folder of runs. Runs never change."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, Final, Literal, get_args

from sonde.errors import SondeError
from sonde.run import open_inside
from sonde.show.web.query import ConflictError
from sonde.show.web.runs import signature_of

State = Literal["open", "acknowledged", "muted"]
STATES: Final[tuple[State, ...]] = get_args(State)
FILE: Final = ".sonde-findings.json"
MAX_BYTES: Final = 4 << 20


class FindingStates:
    """States by run and finding; "open" is not stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[object, dict[str, dict[str, Any]]]] = {}

    def of(self, home: Path, run: str) -> dict[str, dict[str, Any]]:
        """The states of one run: key of the finding -> {state, severity}."""
        with self._lock:
            return dict(self._read(home).get(run, {}))

    def set(self, home: Path, run: str, key: str, state: State, severity: str) -> None:
        with self._lock:
            all = {name: dict(states) for name, states in self._read(home).items()}
            own = all.setdefault(run, {})
            own.pop(key, None)
            if state != "open":
                own[key] = {"state": state, "severity": severity}
            self._write(home, {name: states for name, states in all.items() if states})

    def _read(self, home: Path) -> dict[str, dict[str, Any]]:
        signature = signature_of(home / FILE)
        known = self._known.get(home)
        if known is not None and known[0] == signature:
            return known[1]
        found = _parse(home)
        self._known[home] = signature, found
        return found

    def _write(self, home: Path, all: dict[str, dict[str, Any]]) -> None:
        text = json.dumps(all)
        if len(text) > MAX_BYTES:
            raise ConflictError(f"{FILE} would exceed {MAX_BYTES >> 20} MiB; remove states of old runs from it")
        tmp = home / f"{FILE}-{os.getpid()}"
        try:
            tmp.write_text(text, encoding="utf-8")
            tmp.replace(home / FILE)
        except OSError as error:
            raise ConflictError(f"cannot save the state: cannot write to {home} ({error.strerror})") from error
        self._known.pop(home, None)


def _parse(home: Path) -> dict[str, dict[str, Any]]:
    """The valid entries of the file, which is not trusted."""
    try:
        with open_inside(home, FILE) as file:
            document = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError, SondeError):
        return {}
    if not isinstance(document, dict):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for run, states in document.items():
        if isinstance(states, dict):
            found[run] = {key: one for key, one in states.items() if _is_state(one)}
    return found


def _is_state(one: object) -> bool:
    return isinstance(one, dict) and one.get("state") in STATES
