"""Forgetting: the loss on old data rises while new data are learned."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.check import all_rules
from sonde.diagnose.measures.loss import validation
from sonde.schema.window import Window
from windows import falling, stack, stuck, window


def seen(retained: list[float], loss: np.ndarray, name: str = "eval_retained_loss") -> Window:
    made = window(stack("Linear 8 8"), loss, {})
    made.scalars[name] = np.linspace(0, len(loss) - 1, len(retained)).astype(np.int64), np.array(retained)
    return made


@pytest.mark.parametrize("name", ["eval_retained_loss", "eval/retention/loss", "pretraining_loss"])
def test_a_rising_loss_on_old_data_is_found(name):
    (finding,) = all_rules()["forgetting"](seen([2.0, 2.1, 2.6, 3.0, 3.2], falling(100), name))
    assert finding.rule == "forgetting"
    assert finding.step == 49
    assert "rose from 2 to 3" in finding.message


@pytest.mark.parametrize(
    ("retained", "loss"),
    [
        ([2.0, 2.05, 1.98, 2.1, 2.06], falling(100)),
        ([2.0, 1.6, 1.2, 1.0, 0.9], falling(100)),
        ([2.0, 3.0], falling(100)),
        ([np.nan] * 5, falling(100)),
        ([2.0, 4.0, 2.0, 2.0, 2.0], falling(100)),
    ],
)
def test_nothing_is_lost(retained, loss):
    assert list(all_rules()["forgetting"](seen(retained, loss))) == []


def test_old_data_are_no_validation():
    made = seen([2.0, 3.0, 4.0, 5.0], stuck(50))
    assert len(validation(made)[0]) == 0


def test_another_loss_is_ignored():
    assert list(all_rules()["forgetting"](seen([1.0, 2.0, 3.0, 4.0], falling(100), "eval_loss"))) == []
