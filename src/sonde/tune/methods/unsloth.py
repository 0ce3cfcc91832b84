"""LoRA with Unsloth's kernels, if the package is installed and a GPU is available."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from sonde.errors import UsageError
from sonde.tune.config import MethodConfig
from sonde.tune.method import TransformersMethod

_USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Method(TransformersMethod):
    is_adapter = True

    def load_options(self, config: MethodConfig) -> dict[str, Any]:
        _require()
        return {}

    def prepare(self, model: Any, config: MethodConfig) -> Any:
        _require()
        from unsloth import FastLanguageModel

        return FastLanguageModel.get_peft_model(
            model,
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=config.target_modules or _USUAL,
        )


def _require() -> None:
    missing = [] if find_spec("unsloth") else ["the package unsloth (pip install unsloth)"]
    missing += [] if torch.cuda.is_available() else ["a CUDA device"]
    if missing:
        raise UsageError(
            f'unsloth needs {" and ".join(missing)}. training_method="lora" trains the same adapters with PEFT.'
        )
