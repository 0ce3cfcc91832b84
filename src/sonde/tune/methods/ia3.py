"""(IA)³: keys, values and the inner activations of feed-forward layers are rescaled. Liu et al. 2022."""

from __future__ import annotations

from typing import Any

from sonde.tune.config import MethodConfig
from sonde.tune.method import PeftMethod


class Method(PeftMethod):
    def adapter(self, peft: Any, config: MethodConfig) -> Any:
        return peft.IA3Config(target_modules=config.target_modules, task_type="CAUSAL_LM")
