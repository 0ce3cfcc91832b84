"""Background tasks are done once each, in turn; a failing one is logged, and an idle thread ends."""

from __future__ import annotations

import logging
import threading

import pytest

from sonde.show.web.caches.background import BackgroundTasks


def test_what_is_asked_for_twice_before_it_is_done_is_done_once() -> None:
    may_go_on, done = threading.Event(), []

    def work(task: int) -> None:
        assert may_go_on.wait(10)
        done.append(task)

    tasks = BackgroundTasks("test", work)
    for key, task in ((1, 1), (2, 2), (2, 3)):
        tasks.add(key, task)
    assert tasks.num_pending == 2
    may_go_on.set()
    tasks.wait(10)
    assert done == [1, 2]
    assert tasks.num_pending == 0
    tasks.add(2, 4)  # the thread has ended: another one begins
    tasks.wait(10)
    assert done == [1, 2, 4]


def test_an_errand_that_fails_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done = []
    tasks = BackgroundTasks[int]("test", lambda task: done.append(1 // task))
    with caplog.at_level(logging.ERROR):
        tasks.add("bad", 0)
        tasks.add("good", 1)
        tasks.wait(10)
        tasks.wait(10)
    assert done == [1]
    assert "bad failed" in caplog.text


def test_nothing_is_begun_after_closing() -> None:
    done: list[int] = []
    tasks = BackgroundTasks("test", done.append)
    tasks.close()
    tasks.add(1, 1)
    assert done == []
    assert tasks.num_pending == 0
