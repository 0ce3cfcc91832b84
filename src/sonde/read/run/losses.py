"""What the writer of a run said it did not record, and why: its events, and what its heartbeat counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Final

from sonde.errors import CorruptError
from sonde.read.run.catalog import read_rows
from sonde.read.run.manifest import Heartbeat
from sonde.read.run.ranks import rank_events
from sonde.schema.records import LOSSES

MAX_OF_A_TYPE: Final = 20


def loss_warnings(run: Path, heartbeat: Heartbeat, *, is_live: bool) -> list[str]:
    """In words, in the order in which it happened; each once."""
    return [*_dropped(heartbeat), *_told(run, is_live=is_live)]


def _dropped(heartbeat: Heartbeat) -> list[str]:
    found = []
    for stream, count in heartbeat.dropped.items():
        num_failed = heartbeat.failed.get(stream, 0)
        if count > num_failed:
            # Runs of before said how many, and not why.
            why = ": the disk was slower than training, and the queue was full" if heartbeat.failed else ""
            found.append(f"{count - num_failed:,} records of {stream} were dropped{why}")
        if num_failed:
            found.append(f"{num_failed:,} records of {stream} could not be written")
    return found


def _told(run: Path, *, is_live: bool) -> list[str]:
    try:
        own = [row[1:7] for row in read_rows(run, "events", is_live=is_live) if len(row) >= 7]
    except CorruptError:  # said of the catalog as a whole
        own = []
    messages: dict[str, str] = {}
    for _, _, type, _, message, details, *_ in (*own, *rank_events(run)):
        if type in LOSSES and (type != "gap" or _num_dropped(details)):
            messages.setdefault(str(message), str(type))
    num_of: Counter[str] = Counter()
    found = []
    for message, type in messages.items():
        num_of[type] += 1
        if num_of[type] <= MAX_OF_A_TYPE or type == "warning":  # those are different from one another
            found.append(message)
    more = {type: num - MAX_OF_A_TYPE for type, num in num_of.items() if num > MAX_OF_A_TYPE and type != "warning"}
    return [*found, *(f"{num} more events of the type {type}; events() has them all" for type, num in more.items())]


def _num_dropped(details: object) -> int:
    try:
        found = json.loads(str(details))
        return int(found["num_dropped"])
    except (ValueError, KeyError, TypeError):
        return 0
