"""The test suite for fine-tuning methods. To test a new one, write one class that makes it. Needs transformers and TRL.

class TestMyMethod(MethodTests):
    def method(self):
        return MyMethod()
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from sonde.tune.config import MethodConfig, ModelConfig
from sonde.tune.method import FineTuningMethod
from sonde.tune.train.data import generate
from sonde.tune.train.model import load_model, load_tokenizer
from sonde.tune.train.wrapper import TrainingResult, TrainingWrapper

_TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class MethodTests:
    """Subclass it, and make the method."""

    config: ClassVar[MethodConfig] = MethodConfig(r=4)
    model: ClassVar[ModelConfig] = ModelConfig(architecture="llama", options={**_TINY, "num_key_value_heads": 2})
    """The model to train: small, with random weights."""
    learning_rate: ClassVar[float] = 1e-2

    def method(self) -> FineTuningMethod:
        """A new method."""
        raise NotImplementedError

    def ready(self) -> tuple[FineTuningMethod, Any, dict[str, torch.Tensor]]:
        """The method, the model it prepared, and a batch."""
        torch.manual_seed(0)
        tokenizer = load_tokenizer(self.model, ["one two three four five"])
        method = self.method()
        prepared = method.setup_training(load_model(self.model, method, self.config, tokenizer), self.config)
        tokens = torch.tensor([tokenizer("one two three four five")["input_ids"]] * 2)
        return method, prepared, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    def steps(self, num_steps: int) -> tuple[Any, list[float]]:
        """The model after some steps on one batch, and the losses."""
        method, model, batch = self.ready()
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=self.learning_rate)
        losses = []
        for _ in range(num_steps):
            loss = method.train_step(batch)
            assert isinstance(loss, torch.Tensor)
            assert loss.numel() == 1, "train_step returns one number"
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return model, losses

    def test_the_model_has_something_to_train(self) -> None:
        method, model, _ = self.ready()
        assert isinstance(method, FineTuningMethod)
        assert isinstance(model, nn.Module)
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trainable > 0
        if method.is_adapter:
            assert trainable < sum(p.numel() for p in model.parameters()), "an adapter leaves the base model frozen"

    def test_steps_lower_the_loss_and_leave_frozen_weights_alone(self) -> None:
        _, before, _ = self.ready()
        after, losses = self.steps(30)
        assert all(torch.isfinite(torch.tensor(losses)))
        assert losses[-1] < losses[0], "30 steps on one batch did not lower its loss"
        old = dict(before.named_parameters())
        changed = {name for name, p in after.named_parameters() if not torch.equal(p, old[name])}
        assert changed
        assert changed <= {name for name, p in after.named_parameters() if p.requires_grad}

    def test_a_checkpoint_is_written(self, tmp_path: Path) -> None:
        method, _, _ = self.ready()
        method.save_checkpoint(tmp_path / "final")
        assert [path for path in (tmp_path / "final").rglob("*") if path.is_file()]

    def train(self, folder: Path, **options: Any) -> TrainingResult:
        wrapper = TrainingWrapper(
            model=self.model,
            training_method=self.method(),
            method=self.config,
            run={"dir": folder / "runs"},
            checkpoint_interval=2,
            learning_rate=self.learning_rate,
            batch_size=4,
            max_length=16,
            scheduler="constant",
            arguments={"disable_tqdm": True},
        )
        return wrapper.train(generate("copying", 24), folder / "out", **options)

    def test_an_interrupted_training_resumes_as_if_it_had_not_been(self, tmp_path: Path) -> None:
        whole = self.train(tmp_path / "whole", max_steps=6)
        self.train(tmp_path / "parts", max_steps=4)
        resumed = self.train(tmp_path / "parts", max_steps=6, resume=True)
        assert [one.step for one in resumed.checkpoints] == [2, 4, 6]
        assert resumed.num_steps == whole.num_steps == 6
        weights = [dict(result.model.named_parameters()) for result in (whole, resumed)]
        different = [name for name, p in weights[0].items() if not torch.equal(p, weights[1][name])]
        assert different == []

    def test_the_training_is_recorded(self, tmp_path: Path) -> None:
        from sonde.run import open as open_run

        result = self.train(tmp_path, max_steps=2)
        assert result.run is not None
        run = open_run(result.run)
        names = {name for name, p in result.model.named_parameters() if p.requires_grad}
        if not names:
            pytest.skip("nothing is trained")
        assert run.scalars("loss")["step"].to_pylist() == [0, 1]
        assert len(run.stats("grad/*/norm")) > 0
        assert (result.output_dir / "final").is_dir()
