from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from sonde.errors import RunLockedError
from sonde.read.run.folder import read_manifest
from sonde.read.run.sharded import open_state
from sonde.read.run.status import is_locked
from sonde.run import Run
from sonde.write.lock import RunLock

WRITE = """
import sys, time
from pathlib import Path
import numpy as np
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import empty_rows

dir, num_steps, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
run = create_run(dir, project="gpt", name="child")
writer = Writer(run, WriterOptions(flush_interval_s=0.01, heartbeat_s=0.05, seal_steps=50))
site = writer.site_id(Site(kind="grad", name="0.weight"))
print(run, flush=True)
for step in range(num_steps):
    rows = empty_rows(1)
    rows[0, 0], rows[0, 5] = 1, step**2
    writer.put(StatsRecord.without_hist(step, 0.0, np.array([site], np.int32), rows), 200, step=step)
    loss = np.array([writer.scalar_id("loss")], np.int32)
    writer.put(ScalarsRecord(loss, np.array([step]), np.zeros(1), np.array([float(step)])), 50, step=step)
    writer.set_step(step + 1)
    time.sleep(0.002)
    if step % 10 == 9 and writer.flush(5.0):
        print(step, flush=True)  # acknowledged
if end == "wait":
    time.sleep(60)
writer.close(end)
"""


@pytest.fixture
def child(tmp_path):
    """`child(num_steps, end)` writes in a separate process; gives (process, run folder)."""
    processes = []

    def start(num_steps: int, end: str = "finished"):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE, str(tmp_path / "runs"), str(num_steps), end],
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_run_is_running_while_its_writer_lives_and_then_finished(record):
    recording = record().steps(3).flush()
    run = Run(recording.path)
    assert (run.status, run.reason) == ("running", "")
    recording.finish()
    assert run.status == "finished"


@pytest.mark.parametrize("status", ["crashed", "interrupted"])
def test_what_the_writer_said_at_the_end_is_shown(record, status):
    recording = record().steps(3)
    recording.writer.close(status, reason="KeyboardInterrupt")
    assert (Run(recording.path).status, Run(recording.path).reason) == (status, "KeyboardInterrupt")


def test_after_kill_9_the_run_is_crashed_and_everything_acknowledged_is_readable(child):
    process, path = child(10_000)
    acknowledged = [int(process.stdout.readline()) for _ in range(12)][-1]
    process.kill()
    process.wait()
    run = Run(path)
    assert run.status == "crashed"
    last_known = max(run.last_step, read_manifest(run.path).heartbeat.step)  # a heartbeat may be ahead of the rows
    assert run.reason == f"the process disappeared (killed, out of memory or power loss) after step {last_known}"
    assert not [warning for warning in run.warnings if "cannot be read" in warning or "damaged" in warning]
    table = run.stats("grad/0.weight/sumsq")
    assert table["step"].to_pylist() == list(range(run.last_step + 1))
    assert run.last_step >= acknowledged
    assert table["value"].to_pylist() == [float(step**2) for step in range(run.last_step + 1)]
    assert run.scalars("loss")["step"].to_pylist()[: acknowledged + 1] == list(range(acknowledged + 1))


def test_following_a_live_run_gives_every_row_once_and_in_order(child):
    _, path = child(300)
    stats, losses, statuses = [], [], []
    for update in Run(path).follow("grad/*/sumsq", "loss", poll_s=0.02):
        stats += update.stats["step"].to_pylist()
        losses += update.scalars["value"].to_pylist()
        statuses.append(update.status)
    assert stats == list(range(300))
    assert losses == [float(step) for step in range(300)]
    assert statuses[-1] == "finished"
    assert "running" in statuses


def test_following_a_run_that_is_killed_ends(child):
    process, path = child(100, "wait")
    assert "99\n" in iter(process.stdout.readline, "")  # at the end of a child that died before, this fails
    losses = []
    for update in Run(path).follow(poll_s=0.01):
        losses += update.scalars["value"].to_pylist()
        if process.poll() is None and len(losses) == 100:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert losses == [float(step) for step in range(100)]
    assert update.status == "crashed"


def test_asking_for_the_status_never_takes_the_lock_from_a_writer(record):
    recording = record().steps(1)
    for _ in range(1000):
        assert is_locked(recording.path)
    with pytest.raises(RunLockedError):
        RunLock(recording.path, patience_s=0)
    recording.steps(1).flush()


ASK = """
import sys, time
from pathlib import Path
from sonde.read.run.status import is_locked

run, end = Path(sys.argv[1]), time.monotonic() + 120
is_locked(run)
print("asking", flush=True)
while time.monotonic() < end:
    is_locked(run)
"""


def is_free(path):
    """Whether a writer without any patience could begin now."""
    try:
        RunLock(path, patience_s=0).release()
    except RunLockedError:
        return False
    return True


def test_a_writer_can_begin_while_somebody_keeps_asking(record):
    """The shared lock of the question is held for a moment only; the writer is patient for longer."""
    path = record().steps(1).finish().path
    process = subprocess.Popen([sys.executable, "-c", ASK, path], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout.readline() == "asking\n"
            num_free = next(n for n in range(500_000) if not is_free(path))  # the question does stand in the way
            for _ in range(10 * num_free + 200):
                RunLock(path).release()
            assert process.poll() is None
        finally:
            process.kill()


def rewrite(path, **facts):
    content = json.loads((path / "run.json").read_text())
    content.pop("crc32", None)
    content.update(facts)
    (path / "run.json").write_text(json.dumps(content))


def test_a_run_on_another_host_is_judged_by_its_heartbeat(finished):
    fresh = {"time": time.time(), "step": 39}
    rewrite(finished.path, status="running", host="elsewhere", heartbeat=fresh)
    assert Run(finished.path).status == "running"
    old = time.time() - 60
    rewrite(finished.path, heartbeat={**fresh, "time": old}, created_time=old)
    assert Run(finished.path).status == "crashed"


def test_a_run_without_a_step_says_so(finished, record):
    path = record("empty").finish().path
    rewrite(path, status="running")
    assert Run(path).reason.endswith("before its first step")


def test_the_lock_file_is_neither_made_nor_changed_by_looking(finished):
    lock = finished.path / "lock"
    before = os.stat(lock)
    assert Run(finished.path).status == "finished"
    after = os.stat(lock)
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    lock.unlink()
    rewrite(finished.path, status="running")
    assert Run(finished.path).status in ("running", "crashed")
    assert not lock.exists()


def test_a_run_that_ends_while_it_is_read_is_not_called_crashed(record):
    """The final status is written before the lock is released: a reader that saw neither must look again."""
    recording = record().steps(3).flush()
    state = open_state(recording.path)
    recording.finish()
    assert state.status().status == "finished"
