"""LoRA with Unsloth's kernels, if the package is installed and a GPU is available."""

from __future__ import annotations

from typing import Any

import torch

from sonde.errors import UsageError
from sonde.tune.config import MethodConfig
from sonde.tune.method import TransformersMethod, why_unusable

_USUAL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Method(TransformersMethod):
    is_adapter = True
    _loaded: Any = None

    def load_options(self, config: MethodConfig) -> dict[str, Any]:
        _require()
        return {}

    def load_model(self, name: str, config: MethodConfig) -> Any:
        """Unsloth replaces layers while it loads a model."""
        _require()
        from unsloth import FastLanguageModel

        self._loaded, _ = FastLanguageModel.from_pretrained(model_name=name, load_in_4bit=False)
        return self._loaded

    def prepare(self, model: Any, config: MethodConfig) -> Any:
        _require()
        if model is not self._loaded:
            raise UsageError(
                "unsloth must load the model itself: pass model_name= (model.name in a file), a folder or a name on "
                'the Hugging Face Hub. For this model use training_method="lora".'
            )
        from unsloth import FastLanguageModel

        return FastLanguageModel.get_peft_model(
            model,
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=config.target_modules or _USUAL,
        )


def _require() -> None:
    missing = [] if torch.cuda.is_available() else ["a CUDA device, which this machine does not have"]
    reason = why_unusable("unsloth")
    missing += [reason] if reason else []
    if missing:
        raise UsageError(
            f'unsloth needs {" and ".join(missing)}. training_method="lora" trains the same adapters with PEFT.'
        )
