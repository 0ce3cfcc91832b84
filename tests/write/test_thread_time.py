"""The CPU time of our threads: each adds its own, and those that have ended still count."""

from __future__ import annotations

import threading
import time

from sonde.write.thread_time import note_thread_time, threads_cpu_s
from sonde.write.writer import Writer


def burn(seconds: float) -> None:
    while time.thread_time() < seconds:
        pass
    note_thread_time()


def in_a_thread(seconds: float) -> None:
    thread = threading.Thread(target=burn, args=(seconds,))
    thread.start()
    thread.join()


def test_threads_that_follow_one_another_all_count():
    before = threads_cpu_s()
    for _ in range(3):  # the system gives each the ident of the one before
        in_a_thread(0.05)
    assert threads_cpu_s() - before >= 0.15


def test_the_writer_counts_its_work(bench, run, quick, until):
    writer = Writer(run, quick)
    before = writer.cpu_s

    def work():
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass

    writer.put(work, 1, step=0)
    until(lambda: writer.cpu_s >= before + 0.1)
    writer.close("finished", deadline_s=20)
    assert writer.cpu_s >= before + 0.1
