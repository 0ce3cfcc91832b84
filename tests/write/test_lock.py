"""Exactly one writer per run, however it ended."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading

import pytest

from sonde.errors import RunError, RunLockedError
from sonde.write.folder import create_run, find_resumable
from sonde.write.lock import RunLock
from sonde.write.writer import Writer


def test_a_second_writer_is_refused_and_a_killed_one_lets_go(bench, run, quick):
    child = bench.child("child_hold.py", run)
    assert child.stdout.readline() == "ready\n"
    with pytest.raises(RunLockedError, match=f"being written by another process, {child.pid} on .*kill {child.pid}"):
        Writer(run, quick)
    child.send_signal(signal.SIGKILL)
    child.wait()
    Writer(run, quick, resume=True).close("finished", deadline_s=20)


def test_a_writer_holds_the_lock_until_it_is_closed(run, quick):
    for resume in (False, True):
        writer = Writer(run, quick, resume=resume)
        with pytest.raises(RunLockedError):
            RunLock(run, patience_s=0)
        writer.close("finished", deadline_s=20)
        RunLock(run, patience_s=0).release()


def test_a_reader_that_asks_is_waited_for_and_not_taken_for_a_writer(run):
    fd = os.open(run / "lock", os.O_CREAT | os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    with pytest.raises(RunLockedError):
        RunLock(run, patience_s=0)
    is_released = threading.Event()
    release = threading.Timer(0.1, lambda: (is_released.set(), os.close(fd)))
    release.start()
    lock = RunLock(run, patience_s=30)
    assert is_released.is_set()
    with pytest.raises(RunLockedError):
        RunLock(run, patience_s=0)
    lock.release()
    release.join()


def test_a_folder_that_is_not_there_cannot_be_locked(tmp_path, quick):
    with pytest.raises(RunError, match="cannot lock"):
        Writer(tmp_path / "nothing", quick)


def test_the_newest_run_is_the_one_to_resume_whoever_holds_it(tmp_path, quick):
    first = create_run(tmp_path, project="p", name="a")
    second = create_run(tmp_path, project="p", name="b")
    assert find_resumable(tmp_path, project="p") == second
    assert find_resumable(tmp_path, project="p", name="a") == first
    writer = Writer(second, quick)
    assert find_resumable(tmp_path, project="p") == second, "an older run would be mixed with something else"
    with pytest.raises(RunLockedError, match=r"an open session in this process.*finish\(\)"):
        Writer(second, quick)
    writer.close("finished", deadline_s=20)
    assert find_resumable(tmp_path, project="q") is None
    assert find_resumable(tmp_path / "nothing", project="p") is None


def test_a_run_is_found_by_its_id_or_folder_in_any_project(tmp_path):
    run = create_run(tmp_path, project="p", name="a")
    id = json.loads((run / "run.json").read_text())["id"]
    assert find_resumable(tmp_path, project="q", name=id) == run
    assert find_resumable(tmp_path, project="q", name=run.name) == run
    assert find_resumable(tmp_path, project="q", name="a") is None


def test_a_forked_child_forgets_the_run_and_leaves_the_parent_its_lock(bench, run, quick):
    writer = Writer(run, quick)
    bench.put_steps(writer, range(5))
    assert writer.flush(20)
    child = os.fork()
    if child == 0:
        writer.abandon()
        record = bench.stats_record(99)
        refused = not writer.put(record, 1, step=99) and not writer.flush(0)
        writer.close("finished")
        writer.event(None)  # type: ignore[arg-type]  not checked
        os._exit(0 if refused else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(RunLockedError):
        RunLock(run, patience_s=0)
    bench.put_steps(writer, range(5, 30))
    writer.close("finished", deadline_s=20)
    assert bench.contents(run).steps() == set(range(30))
