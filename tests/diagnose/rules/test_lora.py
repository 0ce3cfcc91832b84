"""Adapters that are dead, too small or too loud are named; healthy ones, and the first step of any, are not."""

from __future__ import annotations

from typing import Any

import numpy as np

from sonde.diagnose.measures.model import adapters
from sonde.diagnose.rules.lora_rank_too_low import lora_rank_too_low
from sonde.diagnose.rules.lora_scale_too_large import lora_scale_too_large
from sonde.diagnose.rules.lora_zero_init import lora_zero_init
from sonde.schema.window import Window
from windows import falling, window


def model(rank: int, a: str = "down", b: str = "up") -> dict[str, Any]:
    def parameter(name: str, shape: list[int], trainable: bool) -> dict[str, Any]:
        owner = name.rpartition(".")[0]
        return {"name": name, "shape": shape, "owner": owner, "module_type": "Linear", "trainable": trainable}

    shapes = {"base.weight": [64, 32], a: [rank, 32], b: [64, rank]}
    return {"parameters": [parameter(f"fc.{name}", shape, name in (a, b)) for name, shape in shapes.items()]}


def test_adapters_are_found_by_their_shapes() -> None:
    for a, b in (("down", "up"), ("lora_A.default.weight", "lora_B.default.weight")):
        (adapter,) = adapters(window(model(4, a, b), falling(3), {}))
        assert (adapter.module, adapter.a, adapter.b) == ("fc", f"fc.{a}", f"fc.{b}")
        assert (adapter.rank, adapter.width) == (4, 32)


def test_a_module_that_trains_its_own_weights_has_no_adapter() -> None:
    document = model(4)
    for parameter in document["parameters"]:
        parameter["trainable"] = True
    assert not adapters(window(document, falling(3), {}))


def moved(a: object, b: object, weight_a: float) -> Window:
    series = {"grad/fc.down/norm": a, "grad/fc.up/norm": b, "param/fc.down/norm": weight_a, "param/fc.up/norm": 0.0}
    return window(model(4), falling(30), series)


def test_both_zero_is_dead() -> None:
    (finding,) = lora_zero_init(moved(0.0, 0.0, 0.0))
    assert finding.sites == ("fc.down", "fc.up")


def test_the_first_step_of_a_healthy_adapter_is_not() -> None:
    assert not list(lora_zero_init(moved(np.where(np.arange(30) == 0, 0.0, 0.1), 0.1, 1.0)))


def two(num_steps: int, *, in_optimizer: bool = True, is_chosen: bool = True) -> Window:
    """`used.fc` learns, `fc` has no gradient at all."""
    idle = [{**parameter, "in_optimizer": in_optimizer} for parameter in model(4)["parameters"]]
    used = [{**p, "name": f"used.{p['name']}", "owner": f"used.{p['owner']}"} for p in model(4)["parameters"]]
    series = {"grad/used.fc.down/norm": 0.1, "grad/used.fc.up/norm": 0.1}
    if is_chosen:
        series |= {"param/fc.down/norm": 1.0, "param/fc.up/norm": 0.0}
    return window({"parameters": [*idle, *used]}, falling(num_steps), series)


def test_an_adapter_that_no_gradient_reaches_is_dead() -> None:
    (finding,) = lora_zero_init(two(30))
    assert finding.sites == ("fc.down", "fc.up")
    assert finding.message.startswith("1 of 2 adapters is dead (fc): in 30 steps no gradient has reached it")


def test_after_a_few_steps_or_left_out_of_the_optimizer_or_of_the_sites_it_is_not() -> None:
    assert not list(lora_zero_init(two(10)))
    assert not list(lora_zero_init(two(30, in_optimizer=False)))
    assert not list(lora_zero_init(two(30, is_chosen=False)))


def loud(ratio: float) -> Window:
    return window(model(8), falling(60), {"act/fc/rms": ratio, "act/fc.base/rms": 1.0})


def test_an_adapter_that_drowns_its_weight_is_named() -> None:
    (finding,) = lora_scale_too_large(loud(5.0))
    assert "`lora_alpha` to 8 to 16" in finding.remedy


def test_an_adapter_that_adds_a_little_is_not() -> None:
    assert not list(lora_scale_too_large(loud(1.3)))


def test_an_adapter_that_grew_itself_is_not_a_matter_of_scale() -> None:
    grown = window(model(8), falling(60), {"unit/fc.up/adapter_ratio": 300.0})
    quiet = loud(5.0)
    assert not list(lora_scale_too_large(Window({**quiet.series, **grown.series}, quiet.scalars, quiet.facts)))


def in_turn(ratio: float) -> Window:
    """Each module is recorded at other steps."""
    whole = loud(ratio)
    parts = enumerate(whole.names("act/*/rms"))
    turns = {name: (column[0][n::2], column[1][n::2]) for n, name in parts for column in [whole.series[name]]}
    return Window({**whole.series, **turns}, whole.scalars, whole.facts)


def test_modules_recorded_in_turn_are_compared_all_the_same() -> None:
    (finding,) = lora_scale_too_large(in_turn(5.0))
    assert "`lora_alpha` to 8 to 16" in finding.remedy
    assert not list(lora_scale_too_large(in_turn(1.3)))


def stalled(rank: int, used: float, end: float) -> Window:
    loss = np.concatenate([np.geomspace(1.0, end, 60), np.full(90, end)])
    return window(model(rank), loss, {"unit/fc.up/row_rank": used, "unit/fc.up/adapter_ratio": 0.4})


def test_rank_one_at_a_plateau_is_named() -> None:
    (finding,) = lora_rank_too_low(stalled(1, 1.0, 0.4))
    assert "`r=8` (now 1)" in finding.remedy


def test_a_larger_rank_a_low_loss_or_an_idle_rank_is_not() -> None:
    assert not list(lora_rank_too_low(stalled(8, 8.0, 0.4)))
    assert not list(lora_rank_too_low(stalled(1, 1.0, 0.05)))
    assert not list(lora_rank_too_low(stalled(2, 1.0, 0.4)))


def test_empty_windows_say_nothing() -> None:
    for rule in (lora_zero_init, lora_scale_too_large, lora_rank_too_low):
        assert not list(rule(Window()))
