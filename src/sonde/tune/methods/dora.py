"""DoRA: LoRA for the direction of each weight, and its magnitude apart. Liu et al. 2024."""

from __future__ import annotations

from typing import Any

from sonde.tune.config import MethodConfig
from sonde.tune.method import PeftMethod


class Method(PeftMethod):
    def adapter(self, peft: Any, config: MethodConfig) -> Any:
        return peft.LoraConfig(
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=config.target_modules or "all-linear",
            use_dora=True,
            task_type="CAUSAL_LM",
        )
