"""Documents next to run.json: written whole, signed, replaced, and not lost when the disk fails for a while."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sonde.schema.records import check_document
from sonde.write import recorder
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run(tmp_path, project="test")


def test_the_newest_document_is_on_disk_and_signed(run):
    writer = Writer(run, WriterOptions())
    writer.document("model.json", {"modules": [], "lr": float("nan")})
    writer.document("model.json", {"modules": [{"name": "fc"}]})
    assert writer.flush(10)
    data = (run / "model.json").read_bytes()
    writer.close("finished")
    assert check_document(data)
    assert json.loads(data)["modules"] == [{"name": "fc"}]
    assert not list(run.glob("*.tmp"))


def test_a_document_waits_for_the_disk(run, monkeypatch):
    write, fails = recorder.write_durably, [True]

    def failing(path: Path, data: bytes, **options: bool) -> None:
        if fails and path.name == "model.json":
            raise OSError(28, "No space left on device")
        write(path, data, **options)

    monkeypatch.setattr(recorder, "write_durably", failing)
    writer = Writer(run, WriterOptions(flush_interval_s=0.05), on_warning=lambda message: None)
    writer.document("model.json", {"modules": []})
    deadline = time.monotonic() + 10
    while not writer.degraded and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "No space left" in writer.degraded
    fails.clear()
    writer.close("finished")
    assert json.loads((run / "model.json").read_bytes())["modules"] == []


def test_nothing_is_written_after_the_end(run):
    writer = Writer(run, WriterOptions())
    writer.close("finished")
    writer.document("model.json", {"modules": []})
    assert not (run / "model.json").exists()
