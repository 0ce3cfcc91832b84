"""Experts that get no work are named; balanced ones, and lists of layers without a router, are not."""

from __future__ import annotations

from typing import Any

import numpy as np

from sonde.diagnose.rules.moe_routing_collapse import moe_routing_collapse
from sonde.schema.names import Series
from sonde.schema.window import Window

STEPS = np.arange(60)


def model(router: list[int]) -> dict[str, Any]:
    shapes = {"moe.router.weight": router, **{f"moe.experts.{n}.0.weight": [16, 8] for n in range(4)}}
    return {
        "parameters": [
            {"name": name, "shape": shape, "owner": name.rpartition(".")[0], "module_type": "Linear"}
            for name, shape in shapes.items()
        ]
    }


def seen(worked: list[np.ndarray[Any, Any]], router: list[int] | None = None) -> Window:
    series = {Series("grad", "moe.router.weight", "norm"): (STEPS, np.ones(60))}
    for number, steps in enumerate(worked):
        series[Series("grad", f"moe.experts.{number}.0.weight", "norm")] = (steps, np.ones(len(steps)))
    return Window(series, {}, {"model": model(router or [4, 8])})


def test_experts_without_work_are_named_with_the_step_of_their_last() -> None:
    (finding,) = moe_routing_collapse(seen([STEPS, STEPS[:5], STEPS[:3], STEPS[:0]]))
    assert finding.sites == ("moe.experts.1", "moe.experts.2", "moe.experts.3")
    assert finding.step == 5


def test_experts_that_rest_now_and_then_are_not() -> None:
    assert not list(moe_routing_collapse(seen([STEPS, STEPS[::2], STEPS[::3], STEPS[::4]])))


def test_a_list_of_layers_without_a_router_is_not_a_mixture() -> None:
    assert not list(moe_routing_collapse(seen([STEPS, STEPS[:5], STEPS[:3], STEPS[:0]], router=[5, 8])))


def test_an_empty_window_says_nothing() -> None:
    assert not list(moe_routing_collapse(Window()))
