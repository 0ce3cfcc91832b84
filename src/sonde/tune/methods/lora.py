"""LoRA: a product of two small matrices is added to each linear layer. Hu et al. 2021."""

from __future__ import annotations

from typing import Any, ClassVar

from sonde.tune.config import MethodConfig
from sonde.tune.method import PeftMethod


class Method(PeftMethod):
    uses_dora: ClassVar[bool] = False

    def adapter(self, peft: Any, config: MethodConfig) -> Any:
        return peft.LoraConfig(
            r=config.r,
            lora_alpha=config.alpha,
            lora_dropout=config.dropout,
            target_modules=config.target_modules or "all-linear",
            use_dora=self.uses_dora,
            task_type="CAUSAL_LM",
        )
