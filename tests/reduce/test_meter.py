"""What our own work takes, on the host; what a GPU adds to it is tested where there is one."""

from __future__ import annotations

import time

import pytest
import torch

from sonde.budget.meter import Meter


def spend(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_host_time_by_kind_and_inner_work_counted_once():
    meter = Meter()
    with meter.span("optimizer"):
        spend(0.004)
        with meter.span("grads"):
            spend(0.004)
    meter.add("inspect", 0.5)
    meter.end_step(3, 1.0)
    (times,) = meter.done()
    assert times.step == 3
    assert times.step_s == 1.0
    assert times.gpu_s is None
    assert times.is_host_bound
    assert times.host_s["inspect"] == 0.5
    assert times.host_s["grads"] >= 0.004
    assert times.host_s["optimizer"] >= 0.004
    assert meter.done() == []


def test_steps_are_kept_apart():
    meter = Meter()
    for step in range(3):
        meter.add("grads", float(step))
        meter.end_step(step, 1.0)
    assert [times.host_s["grads"] for times in meter.done()] == [0.0, 1.0, 2.0]


def test_an_exception_inside_is_not_held_back():
    meter = Meter()
    with pytest.raises(ZeroDivisionError), meter.span("grads"):
        _ = 1 / 0
    assert meter.host_s > 0


class Clock:
    """An event of a device that there is none of here."""

    def elapsed_time(self, end: object) -> float:
        return 2.0

    def query(self) -> bool:
        return True


def test_gpu_time_of_what_is_rare_is_measured_whenever_it_is_recorded(monkeypatch):
    monkeypatch.setattr("sonde.budget.meter._is_capturing", lambda: False)
    meter = Meter()
    monkeypatch.setattr(meter, "_event", Clock)
    meter.device = torch.device("cuda", 0)
    measured: dict[str, list[int]] = {"grads": [], "activations": []}
    for step in range(100):
        with meter.span("grads"):
            pass
        if step % 9 == 0:
            for _ in range(3):  # all of a step, or nothing
                with meter.span("activations"):
                    pass
        meter.end_step(step, 0.1)
        for times in meter.done():
            for kind, seconds in (times.gpu_s or {}).items():
                assert seconds == pytest.approx(0.002 if kind == "grads" else 0.006)
                measured[kind].append(times.step)
    assert measured["grads"][:8] == [0, 1, 2, 3, 4, 5, 13, 21]
    assert [step for step in measured["grads"] if step > 53] == [61, 69, 77, 85, 93]
    assert measured["activations"] == list(range(0, 99, 9))


def test_the_time_of_a_rest_is_that_between_two_events_and_the_next_step_follows_on(monkeypatch):
    monkeypatch.setattr("sonde.budget.meter._is_capturing", lambda: False)
    meter = Meter()
    monkeypatch.setattr(meter, "_event", Clock)
    meter.device = torch.device("cuda", 0)
    meter.end_step(9, 0.1)
    meter.end_rest(19, 10)
    for step in (20, 21):
        meter.end_step(step, 0.1)
    found = [(times.step, times.num_rested, times.step_s, times.is_exact) for times in meter.done()]
    assert found == [(9, 0, 0.1, False), (19, 10, 0.002, True), (20, 0, 0.002, True)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_time_is_known_later_and_nothing_waits():
    meter = Meter()
    x = torch.randn(4096, 4096, device="cuda")
    meter.see(x)
    for step in range(5):
        with meter.span("grads"):
            torch.cuda._sleep(20_000_000)
        meter.end_step(step, 0.01)
    torch.cuda.synchronize()
    found = meter.done()
    assert [times.step for times in found] == [0, 1, 2, 3]
    assert all(times.gpu_s["grads"] > 0.005 for times in found)
    assert all(times.step_s > 0.005 for times in found)
    assert [times.is_exact for times in found] == [False, True, True, True]  # the first has only the host's time
    assert not found[0].is_host_bound
