"""Events that ranks other than the first wrote into a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sonde.errors import CorruptError
from sonde.read.run.folder import open_regular
from sonde.schema.attempts import Attempt
from sonde.schema.layout import RANKS_FOLDER
from sonde.schema.records import check_document, to_json

MAX_LOG_BYTES: Final = 16 << 20
"""How much of one rank's log is read: tens of thousands of events, where a rank writes a few."""
_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "time": (int, float), "step": int, "type": str, "severity": str, "message": str, "details": dict,
}  # fmt: skip


def rank_events(run: Path, attempts: Sequence[Attempt] = ()) -> list[tuple[Any, ...]]:
    """(time, step, type, severity, message, details, attempt) of every complete line; damaged ones are left out."""
    found = []
    for path in _logs(run):
        with contextlib.suppress(OSError, CorruptError):  # `rank_warnings` reports it
            for line in _content(path)[:MAX_LOG_BYTES].splitlines(keepends=True):
                row = _row(line, attempts)
                if row is not None:
                    found.append(row)
    return found


def rank_warnings(run: Path) -> list[str]:
    """Describe the logs that cannot be read, or not to their end."""
    found = []
    for path in _logs(run):
        name = f"{RANKS_FOLDER}/{path.name}"
        try:
            if len(_content(path)) > MAX_LOG_BYTES:
                found.append(f"{name} is larger than {MAX_LOG_BYTES >> 20} MiB: its later events are not read")
        except (OSError, CorruptError) as error:
            found.append(f"the events in {name} cannot be read: {error}")
    return found


def _logs(run: Path) -> list[Path]:
    folder = run / RANKS_FOLDER
    return [] if folder.is_symlink() or not folder.is_dir() else sorted(folder.glob("rank-*.jsonl"))


def _content(path: Path) -> bytes:
    with open_regular(path, path.name) as file:
        return file.read(MAX_LOG_BYTES + 1)


def _row(line: bytes, attempts: Sequence[Attempt]) -> tuple[Any, ...] | None:
    if not line.endswith(b"\n") or b'"crc32"' not in line or not check_document(line):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), type) for key, type in _TYPES.items()):
        return None
    attempt = _attempt(row.get("attempt_step"), row.get("attempt_time"), attempts)
    details = to_json(row["details"])
    return float(row["time"]), row["step"], row["type"], row["severity"], row["message"], details, attempt


def _attempt(step: Any, moment: Any, attempts: Sequence[Attempt]) -> int:
    """The attempt that the first rank started at this step; of several, the closest in time, because clocks differ."""
    if not isinstance(moment, int | float) or not attempts:
        return 0
    same = [attempt for attempt in attempts if attempt.first_step == step] or attempts
    return min(same, key=lambda attempt: abs(attempt.time - moment)).number
