"""QLoRA: LoRA on a 4-bit base model. Dettmers et al. 2023. Needs bitsandbytes and a GPU."""

from __future__ import annotations

from typing import Any

import torch

from sonde.errors import UsageError
from sonde.tune.config import MethodConfig
from sonde.tune.method import import_peft, why_unusable
from sonde.tune.methods.lora import Method as Lora


class Method(Lora):
    def load_options(self, config: MethodConfig) -> dict[str, Any]:
        _require()
        from transformers import BitsAndBytesConfig

        quantized = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        return {"quantization_config": quantized}

    def prepare(self, model: Any, config: MethodConfig) -> Any:
        _require()
        if not getattr(model, "is_loaded_in_4bit", False):
            raise UsageError(
                "qlora needs a 4-bit model: pass model_name= to have it loaded that way, or load yours with "
                'BitsAndBytesConfig(load_in_4bit=True). For this model use training_method="lora".'
            )
        return super().prepare(import_peft().prepare_model_for_kbit_training(model), config)


def _require() -> None:
    reason = why_unusable("bitsandbytes")
    missing = [reason] if reason else []
    missing += [] if torch.cuda.is_available() else ["a CUDA device, which this machine does not have"]
    if missing:
        raise UsageError(f'qlora needs {" and ".join(missing)}. training_method="lora" works without them.')
