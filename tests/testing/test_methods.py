"""The suite for fine-tuning methods: ours pass, and each planted fault is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from sonde.testing import MethodTests
from sonde.tune import FineTuningMethod
from sonde.tune.methods import find_method

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(Path.cwd() / "cache"))


class TestLora(MethodTests):
    def method(self) -> FineTuningMethod:
        return find_method("lora")


class Whole(FineTuningMethod):
    """The shortest method that works."""

    model: Any

    def setup_training(self, model: Any, config: Any) -> Any:
        self.model = model
        return model

    def train_step(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def save_checkpoint(self, path: Any) -> None:
        self.model.save_pretrained(path)


class FreezesAll(Whole):
    def setup_training(self, model: Any, config: Any) -> Any:
        return super().setup_training(model.requires_grad_(False), config)


class FreezesNothing(Whole):
    is_adapter = True


class LearnsNothing(Whole):
    def train_step(self, batch: Any) -> Any:
        return 0.0 * super().train_step(batch)


class TouchesFrozenWeights(Whole):
    def setup_training(self, model: Any, config: Any) -> Any:
        model.get_input_embeddings().requires_grad_(False)
        return super().setup_training(model, config)

    def train_step(self, batch: Any) -> Any:
        self.model.get_input_embeddings().weight.data.mul_(0.999)
        return super().train_step(batch)


class SavesNothing(Whole):
    def save_checkpoint(self, path: Any) -> None:
        Path(path).mkdir()


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        (FreezesAll, "test_the_model_has_something_to_train"),
        (FreezesNothing, "test_the_model_has_something_to_train"),
        (LearnsNothing, "test_steps_lower_the_loss_and_leave_frozen_weights_alone"),
        (TouchesFrozenWeights, "test_steps_lower_the_loss_and_leave_frozen_weights_alone"),
        (SavesNothing, "test_a_checkpoint_is_written"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, fault: type, test: str) -> None:
    broken = type("Broken", (MethodTests,), {"method": lambda self: fault()})()
    with pytest.raises(AssertionError):
        getattr(broken, test)(*([tmp_path] if test == "test_a_checkpoint_is_written" else []))
