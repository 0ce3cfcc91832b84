"""Prompt tuning: a few learned embeddings come before the text. Lester et al. 2021."""

from __future__ import annotations

from typing import Any

from sonde.tune.config import MethodConfig
from sonde.tune.method import PeftMethod


class Method(PeftMethod):
    def adapter(self, peft: Any, config: MethodConfig) -> Any:
        return peft.PromptTuningConfig(num_virtual_tokens=config.num_virtual_tokens, task_type="CAUSAL_LM")
