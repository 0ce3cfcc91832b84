"""What was not recorded is in `run.warnings`, each with its true reason."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from sonde.schema.records import Event, ScalarsRecord, StatsRecord, sign_document
from sonde.write.folder import create_run
from sonde.write.ranks import RankLog, Start
from sonde.write.recorder import MAX_EVENTS
from sonde.write.writer import Writer, WriterOptions

OPTIONS = WriterOptions(flush_interval_s=0.01, heartbeat_s=0.05, system_interval_s=0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return create_run(tmp_path, project="p", name="n")


def scalar(step: int) -> ScalarsRecord:
    return ScalarsRecord(np.zeros(1, np.int32), np.array([step]), np.zeros(1), np.zeros(1))


def event(type: str, message: str, **details: Any) -> Event:
    return Event(type=type, message=message, step=0, time=time.time(), severity="warning", details=details)


def warnings(run: Path) -> list[str]:
    return sonde.open(run).warnings


def test_records_that_found_the_queue_full_say_so(run: Path) -> None:
    writer = Writer(run, OPTIONS)
    writer.scalar_id("loss")
    assert not writer.put(scalar(3), 1 << 40, step=3)
    writer.close("finished", deadline_s=20)
    assert warnings(run) == [
        "1 record of scalars was dropped: the disk was slower than training, and the queue was full"
    ]


def test_records_that_could_not_be_made_say_why_and_do_not_blame_the_disk(run: Path) -> None:
    writer = Writer(run, OPTIONS)
    writer.put(lambda: 1 // 0, 1, step=1)
    writer.put(lambda: {}["key"], 1, step=2)
    writer.put(lambda: {}["key"], 1, step=3)
    writer.put(StatsRecord(0, 0.0, np.zeros(2, np.int32), np.zeros((1, 1)), np.zeros(0), np.zeros((0, 1))), 1, step=4)
    writer.close("finished", deadline_s=20)
    told = warnings(run)
    assert told[0] == "4 records of stats were not written because of errors"
    assert [line.partition(": ")[0] for line in told[1:]] == ["a record could not be written"] * 3
    assert "ZeroDivisionError" in told[1]
    assert "KeyError" in told[2]
    assert not any("disk" in line for line in told)


def test_a_run_of_before_says_how_many_and_not_why(run: Path) -> None:
    Writer(run, OPTIONS).close("finished", deadline_s=20)
    content = json.loads((run / "run.json").read_text())
    content.pop("crc32")
    content["heartbeat"] = {"time": 0.0, "step": 3, "dropped": {"stats": 7}}
    (run / "run.json").write_text(sign_document(json.dumps(content)))
    assert warnings(run) == ["7 records of stats were dropped"]


def test_events_about_losses_are_warnings_once_each_and_not_without_end(run: Path) -> None:
    writer = Writer(run, OPTIONS)
    for step in range(30):
        writer.event(event("snapshot_skipped", f"the snapshot of step {step} was skipped: no memory"))
        writer.event(event("warning", "the same every time"))
    writer.event(event("gap", "nothing could be written for 1.0 s", num_dropped=0))
    writer.event(event("gap", "nothing could be written for 2.0 s", num_dropped=5))
    writer.event(event("cadence", "one step in two is recorded"))
    writer.close("finished", deadline_s=20)
    told = warnings(run)
    assert told[0] == "the snapshot of step 0 was skipped: no memory"
    assert told.count("the same every time") == 1
    assert "nothing could be written for 2.0 s" in told
    assert told[-1] == "10 more events of type snapshot_skipped; run.events() lists them all"
    assert len(told) == 20 + 1 + 1 + 1


def test_events_that_are_not_kept_are_reported(run: Path) -> None:
    writer = Writer(run, OPTIONS)
    for step in range(MAX_EVENTS + 5):
        writer.event(event("cadence", f"{step}"))
    writer.close("finished", deadline_s=30)
    assert warnings(run) == ["more than 10,000 events; further ones are not recorded"]


def test_what_other_ranks_lost_is_reported_too(run: Path) -> None:
    Writer(run, OPTIONS).close("finished", deadline_s=20)
    log = RankLog(run, 3)
    log.write(event("warning", "a check for NaN failed: no device"), Start(0.0, None))
    log.write(event("nonfinite", "a value that is not finite"), Start(0.0, None))
    assert warnings(run) == ["rank 3: a check for NaN failed: no device"]


def test_records_that_were_damaged_before_a_run_was_resumed_stay_reported(run: Path) -> None:
    writer = Writer(run, OPTIONS)
    writer.event(event("damaged", "7 bytes in the log of stats are damaged; the records in them are lost"))
    writer.close("finished", deadline_s=20)
    assert len(warnings(run)) == 1
