"""The queue refuses rather than waits, and its count of bytes stays true."""

from __future__ import annotations

import signal
import threading

from sonde.write.queue import BoundedQueue


def test_a_full_queue_refuses_until_something_is_taken():
    queue = BoundedQueue(max_bytes=100)
    assert [queue.offer(i, 40) for i in range(4)] == [True, True, False, False]
    assert list(queue.take(10)) == [0]
    assert queue.offer(4, 40)
    assert list(queue.take(1000)) == [1, 4]
    assert queue.num_bytes == 0
    assert queue.is_empty


def test_what_must_not_be_lost_is_never_refused():
    queue = BoundedQueue(max_bytes=0)
    queue.add("event")
    assert list(queue.take(1)) == ["event"]


def test_many_producers_lose_nothing_and_leave_a_true_count():
    queue = BoundedQueue(max_bytes=1 << 30)
    threads = [threading.Thread(target=lambda: [queue.offer(1, 3) for _ in range(5000)]) for _ in range(4)]
    taken = 0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or not queue.is_empty:
        taken += sum(queue.take(1000))
    for thread in threads:
        thread.join()
    taken += sum(queue.take(1 << 30))
    assert taken == 20_000
    assert queue.num_bytes == 0


def test_a_large_queue_wakes_its_reader():
    queue = BoundedQueue(max_bytes=100, flush_bytes=50)
    queue.offer("a", 60)
    queue.wait(300)  # would end this test by its timeout
    assert list(queue.take(100)) == ["a"]


def test_a_signal_handler_may_put_while_the_main_thread_puts():
    queue = BoundedQueue(max_bytes=1 << 30)
    num_handled = 0

    def handle(number, frame):
        nonlocal num_handled
        num_handled += 1
        queue.offer("from the handler", 1)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        num_put = 0
        while num_handled < 50:
            queue.offer("from the loop", 1)
            num_put += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(list(queue.take(1 << 30))) == num_put + num_handled
