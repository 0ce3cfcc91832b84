"""Runs on a real disk, read back with nothing but pyarrow, sqlite3 and the frame decoder."""

from __future__ import annotations

import hashlib
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

from sonde.record.folder import create_run
from sonde.record.writer import Writer, WriterOptions
from sonde.schema.layout import row_text
from sonde.schema.records import LOG_HEADER_SIZE, ScalarsRecord, Site, StatsRecord, decode_frames
from sonde.schema.sketch import SUM, N, empty_rows

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


@dataclass
class Contents:
    """What a run folder holds: the sum of each (site id, step), each scalar, and where they came from."""

    sums: dict[tuple[int, int], float] = field(default_factory=dict)
    scalars: dict[tuple[int, int], float] = field(default_factory=dict)
    log_sequences: list[int] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    sites: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    def steps(self) -> set[int]:
        return {step for _, step in self.sums}


def contents(run: Path) -> Contents:
    """Read everything, checking every checksum; log frames that are sealed already are passed over."""
    found = Contents()
    connection = sqlite3.connect(f"file:{run / 'catalog.sqlite'}?mode=ro", uri=True)
    connection.row_factory = sqlite3.Row
    for table in ("sites", "scalar_names", "segments"):
        for row in connection.execute(f"select * from {table}"):
            assert zlib.crc32(row_text(*tuple(row)[:-1])) == row["crc"]
    found.sites = {row["id"]: row["name"] for row in connection.execute("select * from sites")}
    found.names = {row["id"]: row["name"] for row in connection.execute("select * from scalar_names")}
    found.segments = [dict(row) for row in connection.execute("select * from segments order by id")]
    found.events = [dict(row) for row in connection.execute("select * from events order by id")]
    connection.close()
    sealed = {"stats": -1, "scalars": -1}
    for segment in found.segments:
        data = (run / segment["file"]).read_bytes()
        assert hashlib.sha256(data).hexdigest() == segment["sha256"]
        if segment["level"] == 0:
            assert segment["first_sequence"] == sealed[segment["stream"]] + 1
            sealed[segment["stream"]] = segment["last_sequence"]
            _add_segment(found, segment["stream"], run / segment["file"])
    for stream, last in sealed.items():
        _add_logs(found, stream, run / stream / "rank-0000", last)
    return found


def _add_segment(found: Contents, stream: str, path: Path) -> None:
    table = pq.read_table(path, page_checksum_verification=True)
    by, value = ("site", "sum") if stream == "stats" else ("name", "value")
    keys = list(zip(table[by].to_pylist(), table["step"].to_pylist(), strict=True))
    assert keys == sorted(keys)
    target = found.sums if stream == "stats" else found.scalars
    assert not target.keys() & set(keys)
    target.update(zip(keys, table[value].to_pylist(), strict=True))


def _add_logs(found: Contents, stream: str, folder: Path, sealed: int) -> None:
    seen = set()
    for path in sorted(folder.glob("*.log")):
        for frame in decode_frames(path.read_bytes(), LOG_HEADER_SIZE):
            if frame.sequence <= sealed or frame.sequence in seen:
                continue
            seen.add(frame.sequence)
            record = frame.record
            if isinstance(record, StatsRecord):
                found.log_sequences.append(frame.sequence)
                for site, value in zip(record.site_ids, record.rows[:, SUM], strict=True):
                    found.sums[int(site), record.step] = float(value)
            else:
                for name, step, value in zip(record.name_ids, record.steps, record.values, strict=True):
                    found.scalars[int(name), int(step)] = float(value)


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
        writer.set_step(step)
        record = stats_record(step, num_sites)
        taken += writer.put(record, record.rows.nbytes, step=step)
        writer.put(scalars_record(step, loss), 28, step=step)
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
