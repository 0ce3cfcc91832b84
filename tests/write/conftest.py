"""Runs on a real disk, read back with nothing but pyarrow, sqlite3 and the frame decoder."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sonde.schema.layout import row_text
from sonde.schema.records import LOG_HEADER_SIZE, Frame, ScalarsRecord, Site, StatsRecord, decode_frames
from sonde.schema.sketch import SUM, N, empty_rows
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass
class Contents:
    """What a run folder shows: the sum of each (site id, step), each scalar, and where they came from."""

    sums: dict[tuple[int, int], float] = field(default_factory=dict)
    scalars: dict[tuple[int, int], float] = field(default_factory=dict)
    log_sequences: list[int] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    sites: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    is_dead: bool = False

    def steps(self) -> set[int]:
        return {step for _, step in self.sums}

    def holes(self) -> set[int]:
        """Steps of which there are sketches or scalars, and not both."""
        return self.steps() ^ {step for _, step in self.scalars}

    def is_shown(self, stream: str, sequence: int, made_at: int) -> bool:
        """The rule of docs/run-folder.md, word by word."""
        own = [a for a in self.attempts if a[f"{stream}_sequence"] <= sequence]
        number = own[-1]["id"] if own else 0
        is_abandoned = any(a["first_step"] <= made_at for a in self.attempts if a["id"] > number)
        is_cut_off = number < len(self.attempts) and made_at >= self.attempts[number]["visible_step"]
        is_ended = number == len(self.attempts) - 1 and not self.is_dead
        return not is_abandoned and (is_ended or not is_cut_off)


def contents(run: Path) -> Contents:
    """Read everything, checking every checksum; log frames that are sealed already are passed over."""
    found = Contents()
    connection = sqlite3.connect(f"file:{run / 'catalog.sqlite'}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    for table in ("sites", "scalar_names", "segments", "attempts"):
        for row in connection.execute(f"select * from {table}"):
            assert zlib.crc32(row_text(*tuple(row)[:-1])) == row["crc"]
    found.sites = {row["id"]: row["name"] for row in connection.execute("select * from sites")}
    found.names = {row["id"]: row["name"] for row in connection.execute("select * from scalar_names")}
    found.segments = [dict(row) for row in connection.execute("select * from segments order by id")]
    found.attempts = [dict(row) for row in connection.execute("select * from attempts order by id")]
    found.events = [dict(row) for row in connection.execute("select * from events order by id")]
    connection.close()
    found.is_dead = json.loads((run / "run.json").read_text())["status"] == "running"
    sealed = {
        stream: max(
            [s["last_sequence"] for s in found.segments if s["stream"] == stream and not s["level"]], default=-1
        )
        for stream in ("stats", "scalars")
    }
    frames = {stream: _frames(run / stream / "rank-0000", last) for stream, last in sealed.items()}
    if found.attempts and frames["scalars"]:
        mark = frames["scalars"][-1].mark
        found.attempts[-1]["visible_step"] = mark.visible
    expected = {"stats": 0, "scalars": 0}
    for segment in found.segments:
        data = (run / segment["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == segment["sha256"]
        if segment["level"] == 0:
            assert segment["first_sequence"] == expected[segment["stream"]]
            expected[segment["stream"]] = segment["last_sequence"] + 1
            _add_segment(found, segment, run / segment["file"])
    found.log_sequences = [frame.sequence for frame in frames["stats"]]
    for stream in ("stats", "scalars"):
        for frame in frames[stream]:
            _add_frame(found, stream, frame)
    return found


def _add_segment(found: Contents, segment: dict[str, Any], path: Path) -> None:
    stream = segment["stream"]
    table = pq.read_table(path, page_checksum_verification=True)
    by, value = ("site", "sum") if stream == "stats" else ("name", "value")
    keys = list(zip(table[by].to_pylist(), table["step"].to_pylist(), strict=True))
    assert keys == sorted(keys)
    facts = json.loads(table.schema.metadata[b"sonde"])
    sequences = [a["id"] for a in found.attempts if a[f"{stream}_sequence"] <= segment["last_sequence"]]
    assert facts["attempt"] == (sequences[-1] if sequences else 0)
    shown = {
        key: number
        for key, number in zip(keys, table[value].to_pylist(), strict=True)
        if found.is_shown(stream, segment["last_sequence"], key[1])
    }
    target = found.sums if stream == "stats" else found.scalars
    assert not target.keys() & shown.keys()
    target.update(shown)


def _frames(folder: Path, sealed: int) -> list[Frame]:
    found: dict[int, Frame] = {}
    for path in sorted(folder.glob("*.log")):
        for frame in decode_frames(path.read_bytes(), LOG_HEADER_SIZE):
            if frame.sequence > sealed:
                found.setdefault(frame.sequence, frame)
    return [found[sequence] for sequence in sorted(found)]


def _add_frame(found: Contents, stream: str, frame: Frame) -> None:
    record = frame.record
    if isinstance(record, StatsRecord):
        rows = [
            (int(site), record.step, value) for site, value in zip(record.site_ids, record.rows[:, SUM], strict=True)
        ]
    else:
        rows = list(zip(record.name_ids.tolist(), record.steps.tolist(), record.values.tolist(), strict=True))
    target = found.sums if stream == "stats" else found.scalars
    for key, step, value in rows:
        if found.is_shown(stream, frame.sequence, step):
            assert (key, step) not in target
            target[key, step] = float(value)


def stats_record(step: int, num_sites: int = 5) -> StatsRecord:
    """Rows whose sums tell site and step."""
    rows = empty_rows(num_sites)
    rows[:, N] = 10
    rows[:, SUM] = step + np.arange(num_sites) / 1000
    return StatsRecord.without_hist(step, 1.7e9 + step, np.arange(num_sites, dtype=np.int32), rows)


def scalars_record(step: int, name: int = 0) -> ScalarsRecord:
    return ScalarsRecord(np.array([name], np.int32), np.array([step]), np.array([1.7e9]), np.array([step / 7]))


def put_steps(writer: Writer, steps: range, num_sites: int = 5) -> int:
    """Put a record of each step, as a session would; how many were taken."""
    for i in range(num_sites):
        writer.site_id(Site(kind="grad", name=f"layers.{i}.weight", shape=(2, 5)))
    loss = writer.scalar_id("loss")
    taken = 0
    for step in steps:
        record = stats_record(step, num_sites)
        taken += writer.put(record, record.rows.nbytes, step=step)
        writer.put(scalars_record(step, loss), 28, step=step)
        writer.set_step(step + 1)
    return taken


def check_values(found: Contents) -> None:
    for (site, step), value in found.sums.items():
        assert value == step + site / 1000
    for (_, step), value in found.scalars.items():
        assert value == step / 7


@dataclass(frozen=True)
class Bench:
    """The functions above, for tests."""

    contents: Callable[[Path], Contents] = contents
    check_values: Callable[[Contents], None] = check_values
    put_steps: Callable[..., int] = put_steps
    stats_record: Callable[..., StatsRecord] = stats_record
    scalars_record: Callable[..., ScalarsRecord] = scalars_record
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def child(self, script: str, *arguments: object, **keywords: Any) -> subprocess.Popen[str]:
        """A Python process that runs a script of this folder; it is gone when the test ends."""
        child = subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
            **keywords,
        )
        self.children.append(child)
        return child


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for child in bench.children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run(tmp_path / "runs", project="project", name="name")


@pytest.fixture
def quick() -> WriterOptions:
    """Flushes and seals often, samples nothing."""
    return WriterOptions(flush_interval_s=0.01, heartbeat_s=0.05, seal_steps=16, system_interval_s=0)


@pytest.fixture
def writer(run: Path, quick: WriterOptions) -> Iterator[Writer]:
    writer = Writer(run, quick)
    yield writer
    writer.close("finished", deadline_s=20)
