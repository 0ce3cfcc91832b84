"""A fine-tuning method of your own: only the embeddings and the output layer are trained.

    python examples/extend_method.py

A method has three methods and passes `sonde.testing.MethodTests`. The trainer takes care of accumulation, precision,
checkpoints and recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import sonde
from sonde.tune import FineTuningMethod, MethodConfig, ModelConfig, TrainingWrapper, generate

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


class Ends(FineTuningMethod):
    """Trains both ends of the model."""

    is_adapter = True  # checkpoints leave out what is frozen
    model: Any

    def setup_training(self, model: nn.Module, config: MethodConfig) -> nn.Module:
        self.model = model.requires_grad_(False)
        for end in (self.model.get_input_embeddings(), self.model.get_output_embeddings()):
            end.requires_grad_(True)
        return model

    def train_step(self, batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def save_checkpoint(self, path: str | Path) -> None:
        self.model.save_pretrained(path)


def main() -> None:
    wrapper = TrainingWrapper(
        model=ModelConfig(architecture="llama", options=SIZES),
        training_method=Ends(),
        learning_rate=1e-2,
        checkpoint_interval=10,
    )
    result = wrapper.train(generate("counting", 160), "tuned", num_epochs=1)
    assert result.run is not None
    losses = sonde.open(result.run).scalars("loss")["value"].to_pylist()
    print(f"The loss went from {losses[0]:.2f} to {losses[-1]:.2f}; the model is in {result.output_dir / 'final'}.")


if __name__ == "__main__":
    main()
