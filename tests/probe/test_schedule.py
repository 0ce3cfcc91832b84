"""When to record."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sonde.errors import UsageError
from sonde.probe.schedule import ALWAYS, NEVER, as_schedule, every, first

counts = st.integers(1, 50)
steps = st.integers(0, 1000)


def chosen(schedule, stop: int = 30) -> list[int]:
    return [step for step in range(stop) if schedule(step)]


def test_every_and_first():
    assert chosen(every(7)) == [0, 7, 14, 21, 28]
    assert chosen(first(3)) == [0, 1, 2]
    assert chosen(every(1), 4) == [0, 1, 2, 3]


@given(counts, counts, steps)
def test_or_is_either_and_and_is_both(a, b, step):
    assert (first(a) | every(b))(step) == (step < a or step % b == 0)
    assert (first(a) & every(b))(step) == (step < a and step % b == 0)


def test_schedules_print_as_they_were_written():
    schedule = (first(2) | every(100)) & every(3)
    assert repr(schedule) == "(first(2) | every(100)) & (every(3))"
    again = eval(repr(schedule), {"first": first, "every": every})
    assert chosen(again, 400) == chosen(schedule, 400)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "10", None, True])
@pytest.mark.parametrize("make", [every, first])
def test_counts_that_are_none_are_refused_with_an_example(make, wrong):
    with pytest.raises(UsageError, match=r"at least 1, for example"):
        make(wrong)


@pytest.mark.parametrize("operand", [5, "every(5)", lambda step: True])
def test_only_schedules_are_joined(operand):
    with pytest.raises(TypeError, match="Schedule"):
        every(3) | operand
    with pytest.raises(TypeError, match="Schedule"):
        every(3) & operand


def test_what_a_user_may_give():
    default = every(4)

    def given_as(value):
        return as_schedule(value, default=default, argument="grads")

    assert given_as(True) is default
    assert given_as(False) is NEVER
    assert given_as(None) is NEVER
    assert chosen(given_as(5)) == [0, 5, 10, 15, 20, 25]
    assert chosen(given_as(lambda step: step in (3, 4))) == [0, 3, 4]
    assert chosen(ALWAYS, 3) == [0, 1, 2]
    assert chosen(NEVER) == []


def test_first_step_is_always_recorded_unless_nothing_is():
    assert chosen(as_schedule(every(7) & first(0 + 1), default=ALWAYS, argument="x")) == [0]
    assert chosen(as_schedule(lambda step: False, default=ALWAYS, argument="x")) == [0]
    assert chosen(as_schedule(False, default=ALWAYS, argument="x")) == []


def test_function_that_returns_odd_truths_is_a_schedule():
    schedule = as_schedule(lambda step: [step] if step % 2 else [], default=ALWAYS, argument="x")
    assert schedule(3) is True
    assert schedule(2) is False


@pytest.mark.parametrize("wrong", ["every(3)", 2.5, [1, 2], {"every": 3}])
def test_other_values_name_the_argument(wrong):
    with pytest.raises(UsageError, match="activations= must be"):
        as_schedule(wrong, default=ALWAYS, argument="activations")


@pytest.mark.parametrize("wrong", [0, -3])
def test_number_that_is_not_an_interval_is_refused(wrong):
    with pytest.raises(UsageError, match="at least 1"):
        as_schedule(wrong, default=ALWAYS, argument="grads")
