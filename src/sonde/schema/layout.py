"""The layout of a run folder, its format version, and the tables of its catalog. No I/O."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final, Literal

FORMAT_VERSION: Final = 2
"""2 since a run has attempts: a reader of format 1 would show the rows of an abandoned one among the others."""

RUN_FILE: Final = "run.json"
MODEL_FILE: Final = "model.json"
CATALOG_FILE: Final = "catalog.sqlite"
LOCK_FILE: Final = "lock"
LIVE_LOG: Final = "live.log"
LATEST_LINK: Final = "latest"
RANKS_FOLDER: Final = "ranks"
TRASH_FOLDER: Final = ".trash"
ENDING_FILE: Final = "ending.json"
"""The final status, written before waiting for the disk; removed as soon as run.json has it."""
EXIT_CODE_FILE: Final = "exit_code"
"""One byte: the exit code of the process that wrote the run, if it was not known earlier."""
REQUESTS_FOLDER: Final = "requests"
"""Requests of other processes to a run that is being recorded, one small file each."""

Stream = Literal["stats", "scalars"]
STREAMS: Final[tuple[Stream, ...]] = ("stats", "scalars")

RunStatus = Literal["running", "finished", "crashed", "interrupted"]

_STEP_BITS: Final = 44

PYRAMID_FACTOR: Final = 4
"""Level k of the pyramid merges PYRAMID_FACTOR**k steps into one row."""
UNKNOWN_CODE: Final = 120
"""Python could not flush its output, for example to a closed pipe: this says nothing about the program."""
ENDED_AT_EXIT: Final = "ended_at_exit"
"""A fact in run.json: the run ended with its process, whose exit code says how."""
ERROR: Final = "error"
"""A fact in run.json: the exception that ended the program, with its traceback."""
_STOPPED: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})


def stream_folder(run: Path, stream: Stream, rank: int = 0) -> Path:
    return run / stream / f"rank-{rank:04d}"


def rank_log(run: Path, rank: int) -> Path:
    """Events of a rank other than the first, one signed JSON line each."""
    return run / RANKS_FOLDER / f"rank-{rank:04d}.jsonl"


def segment_name(number: int) -> str:
    return f"seg-{number:08d}.parquet"


def pyramid_folder(run: Path, level: int, rank: int = 0) -> Path:
    return run / "pyramid" / f"level-{level}" / f"rank-{rank:04d}"


# Every row that matters carries its own CRC (`crc`: crc32 of the other columns, joined as text by "\x1f"), because
# SQLite returns wrong values after a flipped bit and its integrity check passes.
CATALOG_SCHEMA: Final = """
create table if not exists sites (
    id integer primary key, kind text not null, name text not null, shape text not null, dtype text not null,
    owner text not null, module_type text not null, aliases text not null, crc integer not null,
    unique (kind, name));
create table if not exists scalar_names (id integer primary key, name text not null unique, crc integer not null);
create table if not exists segments (
    id integer primary key, stream text not null, rank integer not null, level integer not null, file text not null,
    num_rows integer not null, first_sequence integer not null, last_sequence integer not null,
    first_step integer not null, last_step integer not null, sha256 text not null,
    tiles text not null, crc integer not null);
create table if not exists attempts (
    id integer primary key, rank integer not null, first_step integer not null, time real not null,
    reason text not null, stats_sequence integer not null, scalars_sequence integer not null,
    complete_step integer not null, visible_step integer not null, crc integer not null);
create table if not exists events (
    id integer primary key, time real not null, step integer not null, type text not null, severity text not null,
    message text not null, details text not null, attempt integer not null default 0);
create table if not exists findings (
    id integer primary key, time real not null, rule text not null, severity text not null, confidence real not null,
    step integer not null, last_step integer not null, sites text not null, message text not null,
    evidence text not null, remedy text not null, attempt integer not null default 0);
create table if not exists system_metrics (
    time real not null, step integer not null, name text not null, value real not null,
    attempt integer not null default 0);
create table if not exists checkpoints (
    id integer primary key, step integer not null, time real not null, path text not null, metrics text not null,
    attempt integer not null default 0);
create table if not exists snapshots (
    id integer primary key, step integer not null, time real not null, store text not null, details text not null,
    crc integer not null);
"""


ATTEMPT_TABLES: Final = ("events", "findings", "system_metrics", "checkpoints")
"""Tables whose last column is the attempt of a row; those of format 1 have no such column."""


def snapshot_row_id(attempt: int, step: int) -> int:
    """The id of a snapshot's row: an attempt has one snapshot of a step, and a checksum covers the whole row.

    >>> snapshot_row_id(0, 500), snapshot_row_id(1, 500) - (1 << 44)
    (500, 500)
    """
    return (attempt << _STEP_BITS) + step


def snapshot_row_attempt(id: int) -> int:
    """The attempt under which a row's snapshot is stored. Earlier versions had one place for all attempts.

    >>> snapshot_row_attempt(snapshot_row_id(1, 500)), snapshot_row_attempt(500)
    (1, 0)
    """
    return id >> _STEP_BITS


def row_text(*columns: object) -> bytes:
    """The text that a catalog row's CRC is computed over."""
    return "\x1f".join(str(column) for column in columns).encode("utf-8", "surrogatepass")


def ending_of(code: int) -> tuple[RunStatus, str]:
    """Status and reason.

    >>> ending_of(0), ending_of(3), ending_of(143)
    (('finished', ''), ('crashed', 'exit code 3'), ('interrupted', 'SIGTERM (exit code 143)'))
    """
    if code == 0:
        return "finished", ""
    try:
        number = signal.Signals(code - 128)
    except ValueError:
        return "crashed", f"exit code {code}"
    return "interrupted" if number in _STOPPED else "crashed", f"{number.name} (exit code {code})"


def lost(last_step: int) -> str:
    """The reason shown for a run whose process disappeared."""
    after = f"after step {last_step:,}" if last_step >= 0 else "before its first step"
    return f"the process disappeared (killed, out of memory or power loss) {after}"
