"""Warnings about data that the writer did not record, from its events and the counts in its heartbeat."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Final

from sonde.errors import CorruptError
from sonde.read.run.catalog import read_rows
from sonde.read.run.manifest import Heartbeat
from sonde.read.run.ranks import rank_events, rank_warnings
from sonde.schema.records import LOSSES

MAX_OF_A_TYPE: Final = 20


def loss_warnings(run: Path, heartbeat: Heartbeat, *, is_live: bool) -> list[str]:
    """Describe what was lost, in order, each once."""
    return [*_dropped(heartbeat), *_reported(run, is_live=is_live), *rank_warnings(run)]


def _dropped(heartbeat: Heartbeat) -> list[str]:
    found = []
    for stream, count in heartbeat.dropped.items():
        num_failed = heartbeat.failed.get(stream, 0)
        if count > num_failed:
            # Runs of earlier versions stored the number, but not the reason.
            why = ": the disk was slower than training, and the queue was full" if heartbeat.failed else ""
            found.append(f"{_records(count - num_failed, stream)} dropped{why}")
        if num_failed:
            found.append(f"{_records(num_failed, stream)} not written because of errors")
    return found


def _records(count: int, stream: str) -> str:
    return f"1 record of {stream} was" if count == 1 else f"{count:,} records of {stream} were"


def _reported(run: Path, *, is_live: bool) -> list[str]:
    try:
        own = [row[1:7] for row in read_rows(run, "events", is_live=is_live) if len(row) >= 7]
    except CorruptError:  # reported for the catalog as a whole
        own = []
    messages: dict[str, str] = {}
    for _, _, type, _, message, details, *_ in (*own, *rank_events(run)):
        if type in LOSSES and (type != "gap" or _num_dropped(details)):
            messages.setdefault(str(message), str(type))
    num_of: Counter[str] = Counter()
    found = []
    for message, type in messages.items():
        num_of[type] += 1
        if num_of[type] <= MAX_OF_A_TYPE or type == "warning":  # warnings differ from one another
            found.append(message)
    more = {type: num - MAX_OF_A_TYPE for type, num in num_of.items() if num > MAX_OF_A_TYPE and type != "warning"}
    return [
        *found,
        *(
            f"{num} more {'event' if num == 1 else 'events'} of type {type}; run.events() lists them all"
            for type, num in more.items()
        ),
    ]


def _num_dropped(details: object) -> int:
    try:
        found = json.loads(str(details))
        return int(found["num_dropped"])
    except (ValueError, KeyError, TypeError):
        return 0
