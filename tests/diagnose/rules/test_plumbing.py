"""Parameters that are not trained, cut graphs, the wrong mode, leaked memory; and the same done on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sonde.diagnose.rule import Rule
from sonde.diagnose.rules.detached_graph import detached_graph
from sonde.diagnose.rules.eval_mode_training import eval_mode_training
from sonde.diagnose.rules.frozen_layers import frozen_layers
from sonde.diagnose.rules.memory_leak import memory_leak
from sonde.diagnose.rules.optimizer_missing_params import optimizer_missing_params
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

LAYERS = ("Linear 8 16", "ReLU", "Linear 16 16", "ReLU", "Linear 16 5")


def changed(key: str, places: tuple[int, ...], layers: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    """A model in which `key` (trainable, in_optimizer) is false for some of the weights."""
    model = stack(*layers)
    for place in places:
        model["parameters"][place][key] = False
    return model


def remarked(recorded: Window) -> bool:
    """Whether what does not train is reported, but as no more than a remark."""
    return [str(finding.severity) for finding in frozen_layers(recorded)] == ["info"]


class TestFrozen:
    def test_all_weights_frozen_and_stalled(self) -> None:
        (finding,) = frozen_layers(window(changed("trainable", (0, 1, 2)), stuck(60), {}))
        assert finding.sites == ("0.weight", "2.weight", "4.weight")
        assert "requires_grad_(True)" in finding.remedy

    def test_a_trained_head_is_transfer_learning(self) -> None:
        assert remarked(window(changed("trainable", (0, 1)), stuck(60), {}))

    def test_tuning_a_few_parameters_can_be_enough(self) -> None:
        assert remarked(window(changed("trainable", (0, 1, 2)), falling(60), {}))

    def test_tuning_the_biases_of_frozen_layers_is_a_choice(self) -> None:
        model = changed("trainable", (0, 1, 2))
        for place in (0, 2, 4):
            bias = {"name": f"{place}.bias", "owner": str(place), "module_type": "Linear", "shape": [16]}
            model["parameters"].append({**bias, "trainable": True, "in_optimizer": True})
        assert remarked(window(model, stuck(60), {}))

    def test_adapters_learn_in_place_of_frozen_weights(self) -> None:
        model = changed("trainable", (0, 1, 2))
        model["parameters"].append({**model["parameters"][0], "name": "0.lora_A", "trainable": True})
        assert remarked(window(model, stuck(60), {}))

    def test_a_frozen_weight_that_looks_freshly_drawn_is_a_mistake(self) -> None:
        drawn = {"unit/2.weight/frozen_rms": 0.25 / 3**0.5, "unit/2.weight/frozen_max": 0.2499}
        (finding,) = frozen_layers(window(changed("trainable", (1,)), falling(60), drawn))
        assert (finding.severity, finding.sites) == ("warning", ("2.weight",))
        trained = drawn | {"unit/2.weight/frozen_max": 0.31}
        model = changed("trainable", (0,))
        named = {name.replace("2.", "0."): value for name, value in trained.items()}
        assert remarked(window(model, falling(60), named))

    def test_a_group_without_a_learning_rate_is_named(self) -> None:
        model = stack(*LAYERS)
        model["parameters"][0]["group"] = 1
        recorded = window(model, falling(60), {})
        steps = recorded.scalars["loss"][0]
        scalars = {**recorded.scalars, "optim/lr": (steps, np.full(60, 0.1)), "optim/group1/lr": (steps, np.zeros(60))}
        (finding,) = frozen_layers(Window(recorded.series, scalars, recorded.facts))
        assert (finding.severity, finding.sites) == ("warning", ("0.weight",))


class TestOptimizer:
    def test_a_head_the_optimizer_does_not_know(self) -> None:
        (finding,) = optimizer_missing_params(window(changed("in_optimizer", (2,)), falling(60), {}))
        assert (finding.severity, finding.sites) == ("critical", ("4.weight",))

    def test_a_head_alone_is_enough_if_it_learns(self) -> None:
        model = changed("in_optimizer", (0, 1))
        assert [f.severity for f in optimizer_missing_params(window(model, falling(60), {}))] == ["info"]
        assert [f.severity for f in optimizer_missing_params(window(model, stuck(60), {}))] == ["critical"]

    def test_frozen_parameters_need_no_optimizer(self) -> None:
        model = changed("in_optimizer", (0,))
        model["parameters"][0]["trainable"] = False
        assert not list(optimizer_missing_params(window(model, stuck(60), {})))

    def test_layers_that_do_not_run_need_none_either(self) -> None:
        model = changed("in_optimizer", (2,))
        model["modules"][4]["order"] = -1
        assert not list(optimizer_missing_params(window(model, stuck(60), {})))

    def test_layers_in_a_plain_list(self) -> None:
        model = {**stack(*LAYERS), "unregistered": ["blocks[0] (Linear)"]}
        (finding,) = optimizer_missing_params(window(model, stuck(60), {}))
        assert "ModuleList" in finding.remedy
        assert [f.severity for f in optimizer_missing_params(window(model, falling(60), {}))] == ["info"]


class TestDetached:
    def test_no_gradient_before_the_cut(self) -> None:
        (finding,) = detached_graph(window(stack(*LAYERS), stuck(60), {"grad/4.weight/norm": 0.1}))
        assert finding.sites == ("0.weight", "2.weight")
        assert "between 2 and 4" in finding.message

    def test_gradients_everywhere(self) -> None:
        series = {f"grad/{place}.weight/norm": 0.1 for place in (0, 2, 4)}
        assert not list(detached_graph(window(stack(*LAYERS), stuck(60), series)))

    def test_a_second_output_that_is_not_used_is_not_a_cut(self) -> None:
        series = {f"grad/{place}.weight/norm": 0.1 for place in (0, 2)}
        assert not list(detached_graph(window(stack(*LAYERS), stuck(60), series)))

    def test_gradients_outside_the_optimizer_are_not_recorded(self) -> None:
        model = changed("in_optimizer", (0, 1))
        assert not list(detached_graph(window(model, stuck(60), {"grad/4.weight/norm": 0.1})))


class TestEvalMode:
    MODEL = stack("Linear 8 16", "BatchNorm1d 16 1", "ReLU", "Linear 16 5")

    def test_since_a_validation(self) -> None:
        share = np.where(np.arange(60) >= 20, 1.0, 0.0)
        (finding,) = eval_mode_training(window(self.MODEL, falling(60), {"model/model/eval_share": share}))
        assert finding.step == 20

    def test_back_in_training(self) -> None:
        share = np.where(np.arange(60) < 20, 1.0, 0.0)
        assert not list(eval_mode_training(window(self.MODEL, falling(60), {"model/model/eval_share": share})))

    def test_some_layers_in_eval_mode_are_a_choice(self) -> None:
        assert not list(eval_mode_training(window(self.MODEL, falling(60), {"model/model/eval_share": 0.5})))

    def test_a_frozen_norm_is_kept_so_on_purpose(self) -> None:
        model = stack("Linear 8 16", "BatchNorm1d 16 1", "ReLU", "Linear 16 5")
        model["parameters"][1]["trainable"] = False
        assert not list(eval_mode_training(window(model, falling(60), {"model/model/eval_share": 1.0})))


class TestMemory:
    def test_graphs_that_stay_alive(self) -> None:
        series = {"model/model/alive": np.minimum(np.arange(40), 8), "model/model/alive_of": 8}
        (finding,) = memory_leak(window(stack(*LAYERS), falling(40), series))
        assert finding.confidence > 0.9

    def test_a_few_kept_graphs_are_a_short_history(self) -> None:
        series = {"model/model/alive": 2, "model/model/alive_of": 8}
        assert not list(memory_leak(window(stack(*LAYERS), falling(40), series)))

    def test_memory_that_grows_with_every_step(self) -> None:
        growing = {"model/model/rss_mb": 500 + 0.5 * np.arange(100)}
        assert list(memory_leak(window(stack(*LAYERS), falling(100), growing)))

    @pytest.mark.parametrize("size", [500 + 40.0 * (np.arange(100) > 50), 500 + 60 * (1 - 0.9 ** np.arange(100))])
    def test_memory_that_grows_once_or_settles(self, size: Any) -> None:
        assert not list(memory_leak(window(stack(*LAYERS), falling(100), {"model/model/rss_mb": size})))


@pytest.mark.parametrize(
    "rule", [frozen_layers, optimizer_missing_params, detached_graph, eval_mode_training, memory_leak]
)
def test_an_empty_window_says_nothing(rule: Rule) -> None:
    assert not list(rule(Window()))
