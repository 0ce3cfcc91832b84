"""BitFit: only the biases are trained. Ben Zaken et al. 2021."""

from __future__ import annotations

from typing import Any

from sonde.errors import UsageError
from sonde.tune.config import MethodConfig
from sonde.tune.method import TransformersMethod


class Method(TransformersMethod):
    is_adapter = True

    def prepare(self, model: Any, config: MethodConfig) -> Any:
        biases = [parameter for name, parameter in model.named_parameters() if name.rpartition(".")[2] == "bias"]
        if not biases:
            raise UsageError(f'{type(model).__name__} has no biases to train. Use training_method="ia3" or "lora".')
        model.requires_grad_(False)
        for bias in biases:
            bias.requires_grad_(True)
        return model
