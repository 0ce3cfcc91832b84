"""Prefix tuning: every layer attends to a few learned keys and values. Li & Liang 2021."""

from __future__ import annotations

from typing import Any

from sonde.tune.config import MethodConfig
from sonde.tune.method import PeftMethod


class Method(PeftMethod):
    def adapter(self, peft: Any, config: MethodConfig) -> Any:
        return peft.PrefixTuningConfig(num_virtual_tokens=config.num_virtual_tokens, task_type="CAUSAL_LM")
