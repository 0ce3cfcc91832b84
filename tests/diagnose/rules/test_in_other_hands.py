"""Faults of loops and trainers: what is cleared, validated, repeated or trained at another rate than was meant."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import pytest

from sonde.diagnose.measures.loss import held_out, learned
from sonde.diagnose.rules.data_duplication import data_duplication
from sonde.diagnose.rules.data_not_shuffled import data_not_shuffled
from sonde.diagnose.rules.detached_graph import detached_graph
from sonde.diagnose.rules.lora_scale_too_large import lora_scale_too_large
from sonde.diagnose.rules.low_precision_underflow import low_precision_underflow
from sonde.diagnose.rules.lr_too_low import lr_too_low
from sonde.diagnose.rules.train_mode_validation import train_mode_validation
from sonde.diagnose.rules.underfitting import underfitting
from sonde.diagnose.rules.uneven_learning_rates import uneven_learning_rates
from sonde.diagnose.rules.wrong_loss_activation_pair import wrong_loss_activation_pair
from sonde.diagnose.rules.zero_grad_too_often import zero_grad_too_often
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 16", "ReLU", "Linear 16 10")
STEPS = 100


class TestTheLossOfATrainer:
    """A trainer logs every tenth step; what sonde measured has all of them."""

    def logged(self, every: int, measured: np.ndarray[Any, Any]) -> Window:
        whole = window(MODEL, falling(STEPS), {"data/loss/train": measured})
        steps, values = whole.scalars["loss"]
        return Window(whole.series, {"loss": (steps[::every], values[::every])}, whole.facts)

    def test_a_loss_logged_now_and_then_is_replaced_by_the_measured_one(self) -> None:
        found = learned(self.logged(10, falling(STEPS)))
        assert found is not None
        assert (found.name, len(found.values)) == ("data/loss/train", STEPS)

    def test_a_loss_logged_at_every_step_is_the_users(self) -> None:
        found = learned(self.logged(1, falling(STEPS)))
        assert found is not None
        assert found.name == "loss"

    def test_nan_that_the_trainer_left_out_of_its_log_counts(self) -> None:
        found = learned(self.logged(1, np.where(np.arange(STEPS) > 50, np.nan, falling(STEPS))))
        assert found is not None
        assert found.has_diverged

    @pytest.mark.parametrize(("scale", "is_known"), [(1.0, True), (64.0, False)])
    def test_a_sum_that_is_divided_by_its_terms_is_a_mean(self, scale: float, is_known: bool) -> None:
        series = {
            "data/loss/reduction": 1, "data/loss/value": 64 * falling(STEPS), "data/loss/terms": 64,
            "data/loss/baseline": 2.3,
        }  # fmt: skip
        made = window(MODEL, scale * falling(STEPS), series)
        at = np.array([30, 60, 90])
        whole = Window(made.series, {**made.scalars, "val_loss": (at, np.array([1.0, 0.9, 0.8]))}, made.facts)
        found = learned(whole)
        assert found is not None
        assert np.isfinite(found.guessing) == is_known
        assert (held_out(whole) is not None) == is_known


class TestWarmup:
    def rising(self, status: str, rate: np.ndarray[Any, Any]) -> Window:
        series = {f"{kind}/{site}.weight/norm": 1e-5 for site in ("0", "2") for kind in ("update",)}
        series |= {f"param/{site}.weight/norm": 1.0 for site in ("0", "2")}
        made = window(MODEL, stuck(STEPS), {**series, "data/loss/baseline": 2.3}, {"status": status})
        return Window(made.series, {**made.scalars, "optim/lr": (np.arange(STEPS), rate)}, made.facts)

    def test_one_that_never_ends_is_named_once_the_run_is_over(self) -> None:
        rate = np.linspace(1e-8, 1e-6, STEPS)
        (finding,) = lr_too_low(self.rising("finished", rate))
        assert "warm-up never ends" in finding.message
        assert not list(lr_too_low(self.rising("running", rate)))

    def test_one_cycle_that_was_cut_off_is_not_a_warmup(self) -> None:
        assert not list(lr_too_low(self.rising("finished", 1e-6 * np.linspace(0, 1, STEPS) ** 4)))


class TestMicroBatches:
    def test_gradients_cleared_in_every_step(self) -> None:
        (finding,) = zero_grad_too_often(
            window(MODEL, falling(60), {"data/batch/micro_batches": 4, "data/batch/cleared": 3})
        )
        assert "a step learns from 1 of 4" in finding.message

    def test_accumulation_is_healthy(self) -> None:
        cleared = (np.arange(60) % 10 == 0).astype(float)
        for once in (0.0, cleared):
            made = window(MODEL, falling(60), {"data/batch/micro_batches": 4, "data/batch/cleared": once})
            assert not list(zero_grad_too_often(made))


class TestValidationMode:
    WITH_DROPOUT = stack("Linear 8 16", "ReLU", "Dropout", "Linear 16 10")

    def test_train_mode_matters_to_dropout(self) -> None:
        share = {"data/loss/validation_train_mode": 1.0}
        (finding,) = train_mode_validation(window(self.WITH_DROPOUT, falling(60), share))
        assert finding.message == "The model is validated in train mode: dropout is on."
        assert not list(train_mode_validation(window(MODEL, falling(60), share))), "no layer differs between the modes"

    def test_eval_mode_is_healthy(self) -> None:
        share = {"data/loss/validation_train_mode": 0.0}
        assert not list(train_mode_validation(window(self.WITH_DROPOUT, falling(60), share)))


class TestOnePartOfTheData:
    def repeated(self, num: int, source: float) -> Window:
        series = {"data/batch/hash": np.arange(STEPS) % num, "data/batch/source_size": source, "data/input/size": 32}
        return window(MODEL, falling(STEPS), series)

    def test_one_batch_of_a_large_set(self) -> None:
        (finding,) = data_duplication(self.repeated(1, 1600))
        assert "`next(iter(loader))` starts over" in finding.remedy

    def test_all_the_data_there_is(self) -> None:
        assert not list(data_duplication(self.repeated(1, 32)))
        assert not list(data_duplication(self.repeated(10, 320)))


class TestUnevenRates:
    def groups(self, slow: float, fast: float, update: float, loss: np.ndarray[Any, Any]) -> Window:
        document = stack("Linear 8 16", "ReLU", "Linear 16 10")
        document["parameters"][0]["group"] = 1
        document["optimizers"] = [{"type": "Adam", "groups": [{"lr": slow}, {"lr": fast}]}]
        series = {"update/0.weight/norm": 4 * update, "update/2.weight/norm": 4e-3 * (slow > 0)}
        made = window(document, loss, {**series, "param/0.weight/norm": 4.0, "param/2.weight/norm": 4.0})
        rates = {"optim/lr": slow, "optim/group1/lr": fast}
        steps = np.arange(len(loss))
        scalars = {name: (steps, np.full(len(loss), value)) for name, value in rates.items()}
        return Window(made.series, {**made.scalars, **scalars}, made.facts)

    def test_a_group_that_is_thrown_away(self) -> None:
        (finding,) = uneven_learning_rates(self.groups(1e-3, 1.0, 5.0, stuck(STEPS)))
        assert finding.sites == ("0.weight",)

    def test_a_group_at_rate_zero(self) -> None:
        (finding,) = uneven_learning_rates(self.groups(0.0, 1e-3, 1e-3, stuck(STEPS)))
        assert finding.sites == ("2.weight",)

    def slow_body(self, rms: float, loss: np.ndarray[Any, Any]) -> Window:
        """The first layer, of 8 by 16 weights, gets a rate of 3e-6."""
        made = self.groups(0.03, 3e-6, 1e-7, loss)
        own = {"update/0.weight/ratio": 1e-7, "update/2.weight/ratio": 1e-3, "param/0.weight/rms": rms}
        series = window(made.facts["model"], loss, own).series
        return Window({**made.series, **series}, made.scalars, made.facts)

    def test_a_fresh_body_that_hardly_moves(self) -> None:
        (finding,) = uneven_learning_rates(self.slow_body(1 / math.sqrt(3 * 8), stuck(STEPS)))
        assert (finding.sites, "lr': 0.03" in finding.remedy) == (("0.weight",), True)

    def test_a_trained_body_may_be_slow(self) -> None:
        assert not list(uneven_learning_rates(self.slow_body(0.7, stuck(STEPS))))
        assert not list(uneven_learning_rates(self.slow_body(1 / math.sqrt(3 * 8), falling(STEPS)))), "it learns anyway"

    def test_a_faster_head_is_healthy(self) -> None:
        assert not list(uneven_learning_rates(self.groups(1e-3, 1e-2, 1e-2, falling(STEPS))))
        assert not list(uneven_learning_rates(self.groups(1e-4, 1e-1, 5.0, falling(STEPS)))), "it learns anyway"


class TestDistillation:
    SIDES: ClassVar = {"data/output/min": -4.0, "data/output/max": -0.1, "data/output/width": 10.0}

    @pytest.mark.parametrize("side", ["output", "target"])
    def test_softmax_of_probabilities(self, side: str) -> None:
        document = {**MODEL, "loss": "kl_div"}
        spreads = {"data/output/log_spread": 20.0, "data/target/log_spread": 30.0, f"data/{side}/log_spread": 0.99}
        (finding,) = wrong_loss_activation_pair(window(document, falling(60), {**self.SIDES, **spreads}))
        assert ("teacher" if side == "target" else "student") in finding.message

    def test_a_high_temperature_is_healthy(self) -> None:
        document = {**MODEL, "loss": "kl_div"}
        spreads = {"data/output/log_spread": 2.0, "data/target/log_spread": 3.0}
        assert not list(wrong_loss_activation_pair(window(document, falling(60), {**self.SIDES, **spreads})))


def test_an_optimizer_whose_loss_does_not_depend_on_its_weights() -> None:
    document = stack("Linear 8 16", "ReLU", "Linear 16 10", "ReLU", "Linear 10 1")
    for place, number in ((0, 0), (1, 0), (2, 1)):
        document["parameters"][place]["optimizer"] = number
    document["modules"][4]["order"] = 0  # the critic is watched as a separate model
    series = {"grad/4.weight/norm": 0.1}
    made = window(document, falling(60), series)
    both = {**made.scalars, **{name: (np.arange(60), np.full(60, 1e-3)) for name in ("optim/lr", "optim/1/lr")}}
    (finding,) = detached_graph(Window(made.series, both, made.facts))
    assert finding.sites == ("0.weight", "2.weight")
    # An optimizer that makes no steps waits for its turn.
    rest = {name: column for name, column in both.items() if name != "optim/lr"}
    assert not list(detached_graph(Window(made.series, rest, made.facts)))


def test_gradients_that_are_all_zero_in_float16() -> None:
    facts = {"dtypes": {"act/0": "float16"}}
    zero = {"grad/0.weight/zero_fraction": 1.0, "grad/2.weight/zero_fraction": 1.0}
    (finding,) = low_precision_underflow(window(MODEL, stuck(60), zero, facts))
    assert finding.severity == "critical"
    assert not list(low_precision_underflow(window(MODEL, stuck(60), zero, {"dtypes": {"act/0": "float32"}})))
    assert not list(
        low_precision_underflow(window(MODEL, stuck(60), {**zero, "grad/2.weight/zero_fraction": 0.3}, facts))
    )


def test_an_adapter_of_usual_scale_that_has_grown_is_not_too_loud() -> None:
    def scaled(scale: float) -> Window:
        parameter = {"owner": "fc", "module_type": "Linear"}
        shapes = {"fc.base.weight": [64, 32], "fc.down": [8, 32], "fc.up": [64, 8]}
        document = {
            "modules": [{"name": "fc", "type": "Linear", "scaling": {"default": scale}}],
            "parameters": [
                {
                    **parameter,
                    "name": name,
                    "shape": shape,
                    "owner": name.rpartition(".")[0],
                    "trainable": "base" not in name,
                }
                for name, shape in shapes.items()
            ],
        }
        return window(document, falling(60), {"act/fc/rms": 5.0, "act/fc.base/rms": 1.0})

    assert list(lora_scale_too_large(scaled(128.0)))
    assert not list(lora_scale_too_large(scaled(2.0)))


def test_targets_that_the_model_moves_itself_are_not_unsorted_data() -> None:
    def targets(means: np.ndarray[Any, Any]) -> Window:
        series = {"data/target/mean": means, "data/target/std": 0.1, "data/target/is_class": 0, "data/input/size": 32}
        return window({**MODEL, "loss": "mse_loss"}, falling(STEPS), series)

    sorted_by_value = np.tile(np.linspace(-1, 1, 20), 5)
    assert list(data_not_shuffled(targets(sorted_by_value)))
    assert not list(data_not_shuffled(targets(np.linspace(0, 10, STEPS) + 0.1 * np.sin(np.arange(STEPS)))))


def test_a_short_run_that_still_falls_is_not_underfitting() -> None:
    noise = 0.02 * np.random.default_rng(0).standard_normal(80)
    series = {"data/loss/baseline": 2.3}
    assert list(underfitting(window(MODEL, 2.2 + noise, series)))
    assert not list(underfitting(window(MODEL, np.linspace(2.3, 2.1, 80) + noise, series)))
