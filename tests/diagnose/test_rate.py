"""The learning rate over a run: at its height, rising, warmed up; and how another one is written."""

from __future__ import annotations

import numpy as np

from sonde.diagnose.measures.rate import is_at_full_rate, is_still_rising, warms_up, write_rate
from sonde.schema.window import Window
from windows import stack

STEPS = np.arange(100)


def at(values: object) -> Window:
    rates = np.broadcast_to(np.asarray(values, float), STEPS.shape)
    return Window(scalars={"optim/lr": (STEPS, rates)}, facts={"model": stack("Linear 4 4")})


def test_a_warmup_is_seen_and_one_that_is_not_over_too() -> None:
    warm = np.minimum(1.0, (STEPS + 1) / 30)
    assert warms_up(at(warm))
    assert not is_still_rising(at(warm))
    assert is_still_rising(at(STEPS / 100))
    assert not warms_up(at(1e-3))


def test_full_rate_is_above_half_of_the_highest() -> None:
    assert is_at_full_rate(at(np.linspace(1, 0, 100)), STEPS).sum() == 50
    assert is_at_full_rate(Window(), STEPS).all()


def test_another_rate_is_written_as_code_for_this_optimizer() -> None:
    assert write_rate(at(0.5), 0.0047) == "Lower the learning rate from 0.5 to 0.002: `SGD(..., lr=0.002)`"
    assert write_rate(at(0.001), 10) == "Raise the learning rate from 0.001 to 0.01: `SGD(..., lr=0.01)`"
    assert "0.1 times" in write_rate(Window(), 0.1)
