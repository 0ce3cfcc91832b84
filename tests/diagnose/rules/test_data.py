"""Labels, frequencies, copies and order of the data."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from sonde.diagnose.check import check
from sonde.diagnose.rule import Rule
from sonde.diagnose.rules.class_imbalance import class_imbalance
from sonde.diagnose.rules.data_duplication import data_duplication
from sonde.diagnose.rules.data_not_shuffled import data_not_shuffled
from sonde.diagnose.rules.label_shuffling import label_shuffling
from sonde.schema.sketch import Array
from sonde.schema.window import Window
from windows import falling, stack, stuck, window

MODEL = stack("Linear 8 16", "ReLU", "Linear 16 10")
GUESSING = float(np.log(10))
TEN = {
    "data/target/is_class": 1, "data/target/num_classes": 10, "data/target/top_share": 0.15, "data/input/size": 64,
    "data/loss/baseline": GUESSING, "data/output/batch_std": 0.6,
}  # fmt: skip


def with_validation(loss: Array, val: list[float], series: Mapping[str, object], acc: float | None = None) -> Window:
    made = window(MODEL, loss, series)
    steps = np.linspace(len(loss) // len(val), len(loss) - 1, len(val)).astype(np.int64)
    extra = {"val_loss": (steps, np.array(val))}
    if acc is not None:
        extra["val_acc"] = (steps, np.full(len(val), acc))
    return Window(made.series, {**made.scalars, **extra}, made.facts)


class TestLabelShuffling:
    def test_learning_by_heart_what_does_not_carry_over(self) -> None:
        (finding,) = label_shuffling(with_validation(falling(100, 2.6, 1.9), [2.31, 2.35, 2.5, 2.7], TEN, acc=0.11))
        assert finding.severity == "warning"

    def test_validation_that_was_better_than_guessing_has_learned(self) -> None:
        assert not list(label_shuffling(with_validation(falling(100, 2.6, 0.1), [1.6, 1.5, 1.9, 2.6], TEN, acc=0.5)))

    def test_outputs_that_ignore_the_input_are_another_fault(self) -> None:
        series = {**TEN, "data/output/batch_std": 0.0}
        assert not list(label_shuffling(with_validation(falling(100, 2.6, 1.9), [2.31, 2.35, 2.5, 2.7], series)))

    NOISE: Mapping[str, object] = {
        **TEN, "data/output/accuracy": 0.12, "model/model/grad_cosine": 0.02,
        "update/0.weight/norm": 0.02, "update/2.weight/norm": 0.02, "param/0.weight/norm": 4, "param/2.weight/norm": 4,
    }  # fmt: skip

    def test_a_model_that_moves_without_ever_finding_anything(self) -> None:
        (finding,) = label_shuffling(window(MODEL, stuck(120), self.NOISE))
        assert finding.confidence < 0.6
        assert "underfitting" in {other.rule for other in check(window(MODEL, stuck(120), self.NOISE))[0].cause_of}

    @pytest.mark.parametrize(
        "change",
        [
            {"model/model/grad_cosine": 0.5},
            {"update/0.weight/norm": 1e-4, "update/2.weight/norm": 1e-4},
            {"data/output/accuracy": 0.4},
            {"data/output/batch_std": 0.0},
            {"data/target/shift": 1.0},
        ],
        ids=["gradients agree", "it has hardly moved", "often right", "constant outputs", "a language model"],
    )
    def test_what_else_keeps_a_loss_near_guessing(self, change: Mapping[str, object]) -> None:
        assert not list(label_shuffling(window(MODEL, stuck(120), {**self.NOISE, **change})))
        assert not list(label_shuffling(window(MODEL, falling(120, 2.3, 2.1), self.NOISE))), "still falling"

    def test_a_model_that_learns_nothing_at_all_is_not_blamed_on_labels(self) -> None:
        assert not list(label_shuffling(with_validation(stuck(100), [2.31, 2.31, 2.31, 2.31], TEN, acc=0.1)))


class TestClassImbalance:
    RARE: Mapping[str, object] = {
        **TEN, "data/target/num_classes": 2, "data/target/top_share": 0.97, "data/loss/baseline": 0.13,
        "data/output/top_share": 1.0, "data/output/accuracy": 0.97,
    }  # fmt: skip

    def test_a_rare_class_that_is_missed(self) -> None:
        assert list(class_imbalance(window(MODEL, falling(60, 0.7, 0.1), self.RARE)))
        assert list(class_imbalance(with_validation(falling(60, 0.7, 0.1), [0.6, 0.6, 0.7], self.RARE, acc=0.7)))

    def test_a_class_that_most_batches_do_not_have(self) -> None:
        right = np.where(np.arange(60) % 5 == 0, 0.85, 1.0)
        assert list(class_imbalance(window(MODEL, falling(60, 0.7, 0.1), {**self.RARE, "data/output/accuracy": right})))

    def test_a_rare_class_that_is_found(self) -> None:
        series = {**self.RARE, "data/output/top_share": 0.97, "data/output/accuracy": 0.999}
        assert not list(class_imbalance(window(MODEL, falling(60, 0.7, 0.01), series)))

    def test_even_classes(self) -> None:
        assert not list(class_imbalance(window(MODEL, stuck(60), TEN)))

    def test_a_discriminator_gets_one_label_for_a_whole_batch(self) -> None:
        series = {**self.RARE, "data/target/top_share": 1.0, "data/loss/baseline": 0.0}
        assert not list(class_imbalance(window(MODEL, stuck(60), series)))

    def test_words_of_a_language_are_never_even(self) -> None:
        assert not list(class_imbalance(window(MODEL, stuck(60), {**self.RARE, "data/target/shift": 1.0})))


class TestDataDuplication:
    def test_every_batch_four_times(self) -> None:
        series = {**TEN, "data/batch/hash": np.arange(200) // 4}
        (finding,) = data_duplication(window(MODEL, falling(200), series))
        assert "50 different batches in 200" in finding.message

    def test_a_language_model_on_a_handful_of_batches(self) -> None:
        series = {"data/batch/hash": np.arange(200) % 9, "data/target/shift": 1.0}
        assert list(data_duplication(window(MODEL, falling(200), series)))

    @pytest.mark.parametrize("hashes", [np.arange(200), np.arange(200) % 64, np.zeros(200)])
    def test_epochs_and_full_batches_are_right(self, hashes: Array) -> None:
        assert not list(data_duplication(window(MODEL, falling(200), {**TEN, "data/batch/hash": hashes})))

    COPIES: Mapping[str, object] = {
        **TEN, "data/input/duplicates": 0.95, "data/input/is_token": 0, "data/input/abs_max": 2.7,
        "data/input/sample_std": 0.9,
    }  # fmt: skip

    def test_batches_of_copies_matter_where_nothing_is_validated(self) -> None:
        (finding,) = data_duplication(window(MODEL, falling(100), self.COPIES))
        assert "95 % of the rows" in finding.message

    @pytest.mark.parametrize(
        "change",
        [{"data/input/abs_max": 1.0}, {"data/input/is_token": 1}, {"data/input/duplicates": 0.4}],
        ids=["whole numbers", "single tokens", "some copies"],
    )
    def test_rows_that_are_equal_by_nature(self, change: Mapping[str, object]) -> None:
        assert not list(data_duplication(window(MODEL, falling(100), {**self.COPIES, **change})))
        assert not list(data_duplication(window(MODEL, stuck(100), self.COPIES))), "nothing is learned by heart"

    def test_copied_rows_matter_where_validation_is_left_behind(self) -> None:
        series = {**TEN, "data/batch/hash": np.arange(100), "data/input/duplicates": 0.6}
        loss = falling(100, 2.3, 0.01)
        assert list(data_duplication(with_validation(loss, [0.8, 0.5, 0.4], series)))
        assert not list(data_duplication(with_validation(loss, [0.8, 0.1, 0.015], series)))


class TestDataNotShuffled:
    def test_batches_of_one_class(self) -> None:
        (finding,) = data_not_shuffled(window(MODEL, stuck(60), {**TEN, "data/batch/label_purity": 1.0}))
        assert "shuffle=True" in finding.remedy

    @pytest.mark.parametrize(("purity", "size"), [(0.2, 64), (1.0, 1), (0.75, 4)])
    def test_mixed_and_small_batches(self, purity: float, size: int) -> None:
        series = {**TEN, "data/batch/label_purity": purity, "data/input/size": size}
        assert not list(data_not_shuffled(window(MODEL, stuck(60), series)))

    def test_a_single_class_is_not_an_order(self) -> None:
        series = {**TEN, "data/batch/label_purity": 1.0, "data/loss/baseline": 0.05}
        assert not list(data_not_shuffled(window(MODEL, stuck(60), series)))

    def test_targets_in_order(self) -> None:
        model = {**MODEL, "loss": "mse_loss"}
        means = np.linspace(-2, 2, 20)[np.arange(60) % 20]
        series = {"data/target/is_class": 0, "data/target/std": 0.1, "data/target/mean": means, "data/input/size": 32}
        assert list(data_not_shuffled(window(model, stuck(60, 0.3), series)))
        shuffled = {**series, "data/target/std": 1.0, "data/target/mean": 0.1 * means}
        assert not list(data_not_shuffled(window(model, stuck(60, 0.3), shuffled)))


@pytest.mark.parametrize("rule", [label_shuffling, class_imbalance, data_duplication, data_not_shuffled])
def test_an_empty_window_says_nothing(rule: Rule) -> None:
    assert not list(rule(Window()))
