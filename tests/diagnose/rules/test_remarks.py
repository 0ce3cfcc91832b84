"""Things worth saying that are no fault by themselves, and what only long runs can show."""

from __future__ import annotations

import numpy as np
import pytest

from sonde.diagnose.rule import Rule
from sonde.diagnose.rules.constant_output import constant_output
from sonde.diagnose.rules.data_starvation import data_starvation
from sonde.diagnose.rules.throughput_regression import throughput_regression
from sonde.diagnose.rules.tiny_batch_norm import tiny_batch_norm
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import stack, stuck, window

NORMED = stack("Linear 8 16", "BatchNorm1d", "Linear 16 5")


def clock(seconds: Array) -> Window:
    return Window(scalars={"clock": (np.arange(len(seconds)), np.cumsum(seconds))})


def test_outputs_that_no_longer_depend_on_inputs() -> None:
    spread = np.where(np.arange(60) >= 30, 0.0, 0.5)
    (finding,) = constant_output(window(NORMED, stuck(60), {"data/output/batch_std": spread, "data/input/size": 32}))
    assert (finding.severity, finding.step) == ("info", 30)


def test_outputs_that_vary() -> None:
    series = {"data/output/batch_std": 0.3, "data/input/size": 32}
    assert not list(constant_output(window(NORMED, stuck(60), series)))


@pytest.mark.parametrize(("size", "num"), [(2, 1), (32, 0)])
def test_batch_norm_over_a_handful(size: int, num: int) -> None:
    assert len(list(tiny_batch_norm(window(NORMED, stuck(60), {"data/input/size": size})))) == num


def test_steps_that_became_slower_for_good() -> None:
    (finding,) = throughput_regression(clock(np.where(np.arange(1000) < 500, 0.5, 1.2)))
    assert 450 <= finding.step <= 550


@pytest.mark.parametrize(
    "seconds",
    [np.full(1000, 0.5), np.where(np.arange(1000) < 500, 0.001, 0.01), np.where(np.arange(1000) % 100 == 0, 30.0, 0.5)],
    ids=["even", "a short run", "pauses"],
)
def test_even_short_and_interrupted_runs(seconds: Array) -> None:
    assert not list(throughput_regression(clock(seconds)))


@pytest.mark.parametrize(("gpu", "num"), [(15.0, 1), (95.0, 0)])
def test_a_gpu_that_waits_for_a_busy_process(gpu: float, num: int) -> None:
    steps = np.arange(300)
    scalars = {
        "clock": (steps, steps.astype(float)),
        "system/process_cpu_percent": (steps[::10], np.full(30, 180.0)),
        "system/gpu0_percent": (steps[::10], np.full(30, gpu)),
    }
    assert len(list(data_starvation(Window(scalars=scalars)))) == num


@pytest.mark.parametrize("rule", [constant_output, tiny_batch_norm, throughput_regression, data_starvation])
def test_an_empty_window_says_nothing(rule: Rule) -> None:
    assert not list(rule(Window()))
