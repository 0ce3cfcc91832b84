"""Errands are done once each, in turn; a failing one is logged, and an idle thread ends."""

from __future__ import annotations

import logging
import threading

import pytest

from sonde.show.web.background import Errands


def test_what_is_asked_for_twice_before_it_is_done_is_done_once() -> None:
    may_go_on, done = threading.Event(), []

    def work(task: int) -> None:
        assert may_go_on.wait(10)
        done.append(task)

    errands = Errands("test", work)
    for key, task in ((1, 1), (2, 2), (2, 3)):
        errands.add(key, task)
    assert errands.num_pending == 2
    may_go_on.set()
    errands.wait(10)
    assert done == [1, 2]
    assert errands.num_pending == 0
    errands.add(2, 4)  # the thread has ended: another one begins
    errands.wait(10)
    assert done == [1, 2, 4]


def test_an_errand_that_fails_is_logged_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    done = []
    errands = Errands[int]("test", lambda task: done.append(1 // task))
    with caplog.at_level(logging.ERROR):
        errands.add("bad", 0)
        errands.add("good", 1)
        errands.wait(10)
        errands.wait(10)
    assert done == [1]
    assert "bad failed" in caplog.text


def test_nothing_is_begun_after_closing() -> None:
    done: list[int] = []
    errands = Errands("test", done.append)
    errands.close()
    errands.add(1, 1)
    assert done == []
    assert errands.num_pending == 0
