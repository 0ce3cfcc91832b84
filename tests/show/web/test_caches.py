"""The caches: bounded in bytes, and answers that take long only as long as they are true or about to change anyway."""

from __future__ import annotations

import threading

from sonde.show.web.caches.cache import ByteCache
from sonde.show.web.caches.throttled import ThrottledAnswers


def test_what_was_not_asked_for_longest_goes_first() -> None:
    cache: ByteCache[str] = ByteCache(30)
    for name in "abc":
        cache.put(name, name, 10)
    assert cache.get("a") == "a"
    cache.put("d", "d", 10)
    assert [cache.get(name) for name in "abcd"] == ["a", None, "c", "d"]
    assert cache.num_bytes == 30


def test_what_is_larger_than_the_cache_is_not_kept_and_pushes_nothing_out() -> None:
    cache: ByteCache[str] = ByteCache(30)
    cache.put("a", "a", 10)
    cache.put("b", "b", 31)
    assert (cache.get("a"), cache.get("b"), cache.num_bytes) == ("a", None, 10)
    cache.put("a", "new", 20)
    assert (cache.get("a"), cache.num_bytes) == ("new", 20)


def test_a_moving_run_rests_and_one_that_ended_does_not() -> None:
    throttled: ThrottledAnswers[int] = ThrottledAnswers()
    work = iter(range(10)).__next__
    assert throttled.get("run", 1, work, is_moving=True) == 0
    assert throttled.get("run", 2, work, is_moving=True) == 0  # it has just been worked out
    assert throttled.get("run", 3, work, is_moving=False) == 1  # it ended: this is the last word
    assert throttled.get("run", 3, work, is_moving=False) == 1
    assert throttled.get("other", 3, work, is_moving=False) == 2


def test_one_works_and_the_others_wait() -> None:
    throttled: ThrottledAnswers[int] = ThrottledAnswers()
    begun, may_end = threading.Event(), threading.Event()
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        begun.set()
        may_end.wait(10)
        return 7

    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(throttled.get("run", 1, work, is_moving=False))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    begun.wait(10)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert (found, calls) == ([7] * 4, [1])


def test_a_failure_is_not_kept() -> None:
    throttled: ThrottledAnswers[int] = ThrottledAnswers()

    def fail() -> int:
        raise ValueError

    for _ in range(2):
        try:
            throttled.get("run", 1, fail, is_moving=True)
        except ValueError:
            continue
        raise AssertionError("it should have failed")
    assert throttled.get("run", 1, lambda: 5, is_moving=True) == 5
