"""Events that other ranks than the first wrote into a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sonde.schema.layout import RANKS_FOLDER
from sonde.schema.records import check_document, to_json

_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "time": (int, float),
    "step": int,
    "type": str,
    "severity": str,
    "message": str,
    "details": dict,
}


def rank_events(run: Path) -> list[tuple[Any, ...]]:
    """(time, step, type, severity, message, details) of every whole line; a torn or damaged one is left out."""
    folder = run / RANKS_FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        if path.is_symlink():
            continue
        for line in path.read_bytes().splitlines(keepends=True):
            row = _row(line)
            if row is not None:
                found.append(row)
    return found


def _row(line: bytes) -> tuple[Any, ...] | None:
    if not line.endswith(b"\n") or b'"crc32"' not in line or not check_document(line):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), type) for key, type in _TYPES.items()):
        return None
    return (float(row["time"]), row["step"], row["type"], row["severity"], row["message"], to_json(row["details"]))
