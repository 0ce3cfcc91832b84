"""How often to record so that the cost stays within a budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sonde.probe.budget import Governor

times = st.floats(1e-7, 10.0)
budgets = st.floats(0.001, 1.0)


def run(governor: Governor, steps: int, own_s: float, train_s: float, start: int = 0) -> list[bool]:
    """Steps of a loop that costs `own_s` when it records; which of them were recorded."""
    recorded = []
    for step in range(start, start + steps):
        is_recorded = governor.allows(step)
        own = own_s if is_recorded else 0.0
        governor.observe(step, own_s=own, step_s=train_s + own, recorded=is_recorded)
        recorded.append(is_recorded)
    return recorded


@given(budgets, times, times)
def test_cost_ends_up_within_the_budget_or_at_the_longest_stride(budget, own_s, train_s):
    governor = Governor(budget=budget, free_steps=0)
    run(governor, 400, own_s, train_s)
    taken = sum(run(governor, 2000, own_s, train_s, start=400))
    is_within = taken * own_s <= budget * 2000 * train_s * 1.001 + 2 * own_s
    assert is_within or governor.stride == 1000


@given(budgets, times, times)
def test_steady_costs_give_a_steady_stride(budget, own_s, train_s):
    governor = Governor(budget=budget, free_steps=0)
    run(governor, 200, own_s, train_s)
    stride = governor.stride
    run(governor, 3000, own_s, train_s, start=200)
    assert governor.stride in (stride, stride + 1, stride - 1)


@given(budgets, times, times, times)
def test_dearer_recording_is_never_done_more_often(budget, cheap, dear, train_s):
    cheap, dear = sorted([cheap, dear])
    strides = []
    for own_s in (cheap, dear):
        governor = Governor(budget=budget, free_steps=0)
        run(governor, 50, own_s, train_s)
        strides.append(governor.stride)
    assert strides[0] <= strides[1]


@given(st.lists(st.tuples(times | st.just(0.0), times | st.just(0.0), st.booleans()), max_size=300), budgets)
def test_any_times_leave_a_stride_in_range(observed, budget):
    governor = Governor(budget=budget, free_steps=10)
    for step, (own_s, step_s, recorded) in enumerate(observed):
        governor.observe(step, own_s=own_s, step_s=step_s, recorded=recorded)
        assert 1 <= governor.stride <= 1000
        assert 0.0 <= governor.overhead <= 1.0


@given(st.integers(1, 500), st.integers(0, 2000))
def test_first_steps_are_never_thinned(stride, step):
    assert Governor(budget=0.01, free_steps=1000, stride=stride).allows(step) == (step < 1000 or step % stride == 0)


def test_free_steps_do_not_change_the_stride():
    governor = Governor(budget=0.01, free_steps=100)
    assert all(run(governor, 99, own_s=1.0, train_s=0.1))
    assert governor.stride == 1
    run(governor, 100, own_s=1.0, train_s=0.1, start=99)
    assert governor.stride == 1000


def test_without_a_budget_everything_is_recorded_and_the_cost_is_still_told():
    governor = Governor(budget=None, free_steps=0)
    assert all(run(governor, 300, own_s=1.0, train_s=1.0))
    assert governor.overhead == 0.5


def test_stride_comes_down_when_recording_gets_cheaper():
    governor = Governor(budget=0.01, free_steps=0)
    run(governor, 100, own_s=0.04, train_s=0.099)
    high = governor.stride
    run(governor, 1000, own_s=0.004, train_s=0.1, start=100)
    assert high > 30
    assert governor.stride <= 5


def test_change_is_told_once():
    governor = Governor(budget=0.01, free_steps=0)
    changes = [governor.observe(step, own_s=0.01, step_s=0.11, recorded=True) for step in range(300)]
    assert changes.count(True) == 1


def test_a_window_without_a_recorded_step_changes_nothing():
    governor = Governor(budget=0.01, free_steps=0, stride=1000)
    assert not any(governor.observe(step, own_s=0.0, step_s=0.1, recorded=False) for step in range(1, 200))
    assert governor.stride == 1000


def test_costs_that_waver_do_not_make_the_stride_swing():
    governor = Governor(budget=0.01, free_steps=0)
    changes = 0
    for step in range(2000):
        own_s = 0.0041 if step // 50 % 2 else 0.0055  # every 5th or every 6th step, in turn
        changes += governor.observe(step, own_s=own_s, step_s=0.1 + own_s, recorded=True)
    assert changes <= 2
