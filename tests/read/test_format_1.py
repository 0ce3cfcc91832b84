"""Runs written by format 1, before there were attempts, are read as they were, and can be continued.

The runs, and what was read of them then, are in fixtures/format-1.tar.gz: one finished, one killed, one resumed.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from sonde.schema.records import ScalarsRecord, StatsRecord
from sonde.schema.sketch import SUMSQ, N, empty_rows
from sonde.write.writer import Writer, WriterOptions

FIXTURE = Path(__file__).parent / "fixtures" / "format-1.tar.gz"
NAMES = ("finished", "killed", "resumed")
OPTIONS = WriterOptions(flush_interval_s=0.01, heartbeat_s=0.05, seal_steps=4, system_interval_s=0)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("format-1")
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(unpacked: Path, tmp_path: Path) -> Path:
    """A copy, to write to."""
    return shutil.copytree(unpacked, tmp_path / "runs")


def expected(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text())[name]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_as_it_did(unpacked, name):
    run, then = sonde.open(unpacked / name), expected(unpacked, name)
    assert run.manifest.heartbeat.attempt == -1
    assert (run.status, run.last_step, run.warnings) == (then["status"], then["last_step"], then["warnings"])
    assert run.stats("*/*/norm").to_pydict() == then["stats"]
    assert run.scalars().drop_columns("time").to_pydict() == then["scalars"]
    assert run.overview("grad/*/rms", points=10).to_pydict() == then["overview"]
    assert run.events()["type"].to_pylist() == then["events"]
    assert run.verify() == []


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_attempt(unpacked, name):
    run = sonde.open(unpacked / name)
    table = run.attempts().drop_columns("started").to_pylist()
    assert table == [{"attempt": 0, "first_step": 0, "last_step": run.last_step, "reason": "start"}]
    assert run.attempt(0).scalars().equals(run.scalars())


@pytest.mark.parametrize("first_step", [None, 12])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_continued_by_a_new_attempt(old, name, first_step):
    then = sonde.open(old / name).scalars("loss").to_pydict()
    last_step = max(then["step"])
    writer = Writer(old / name, OPTIONS, resume=True)
    assert writer.next_step == last_step + 1
    begin = writer.next_step if first_step is None else first_step
    if first_step is not None:
        writer.begin_attempt(first_step, after=writer.next_step)
    put_steps(writer, begin, 6)
    writer.close("finished", deadline_s=20)
    run = sonde.open(old / name)
    assert json.loads((old / name / "run.json").read_text())["format"] == 2
    assert run.attempts()["first_step"].to_pylist() == [0, begin]
    assert run.scalars("loss")["step"].to_pylist() == list(range(begin + 6))
    assert run.scalars("loss")["value"].to_pylist() == [*then["value"][:begin], *range(begin, begin + 6)]
    norms = run.stats("grad/0.weight/norm")
    assert norms["step"].to_pylist() == list(range(begin + 6))
    assert norms["value"].to_pylist()[begin:] == list(range(begin, begin + 6))
    assert run.attempt(0).scalars("loss").to_pydict() == then
    assert run.verify() == run.warnings == []


def put_steps(writer: Writer, begin: int, num_steps: int) -> None:
    """Sketches of norm n and a loss of n at step n."""
    (site,) = [id for (kind, name), id in writer._ids_by_name.items() if (kind, name) == ("grad", "0.weight")]
    loss = np.array([writer.scalar_id("loss")], np.int32)
    for step in range(begin, begin + num_steps):
        rows = empty_rows(1)
        rows[0, N], rows[0, SUMSQ] = 4, step**2
        writer.put(StatsRecord.without_hist(step, 0.0, np.array([site], np.int32), rows), 100, step=step)
        writer.put(ScalarsRecord(loss, np.array([step]), np.zeros(1), np.array([float(step)])), 50, step=step)
        writer.set_step(step + 1)


def test_numbers_logged_by_a_count_of_the_users_own_are_not_abandoned(old):
    """Format 1 does not know at which step they were logged, so the run is continued without a new attempt."""
    path = old / "finished"
    document = json.loads((path / "run.json").read_text())
    document["facts"]["logged_ahead"] = True
    document["heartbeat"]["step"] = 20  # twenty steps were counted, and numbers were logged up to 39
    del document["crc32"]
    (path / "run.json").write_text(json.dumps(document))
    then = sonde.open(path).scalars("loss")["value"].to_pylist()
    writer = Writer(path, OPTIONS, resume=True)
    writer.put(
        ScalarsRecord(np.array([writer.scalar_id("loss")], np.int32), np.array([99]), np.zeros(1), np.ones(1)),
        50,
        step=99,
    )
    writer.close("finished", deadline_s=20)
    run = sonde.open(path)
    assert run.num_attempts == 1
    assert run.scalars("loss")["value"].to_pylist() == [*then, 1.0]


def test_a_reader_of_format_1_refuses_a_run_of_format_2(tmp_path):
    """It would show abandoned rows among the others; the error names the remedy. Here: format 3 and this reader."""
    from sonde.errors import FormatError
    from sonde.write.folder import create_run

    path = create_run(tmp_path / "runs", project="p", name="n")
    document = json.loads((path / "run.json").read_text())
    assert document["format"] == 2
    document.pop("crc32", None)
    (path / "run.json").write_text(json.dumps({**document, "format": 3}))
    with pytest.raises(FormatError, match="pip install -U sonde"):
        sonde.open(path)


def test_tables_of_the_old_catalog_gain_their_column(old):
    Writer(old / "resumed", OPTIONS, resume=True).close("finished", deadline_s=20)
    connection = sqlite3.connect(old / "resumed" / "catalog.sqlite")
    assert connection.execute("select distinct attempt from events").fetchall()[0] == (0,)
    connection.close()
