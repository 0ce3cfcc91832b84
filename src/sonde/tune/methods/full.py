"""Every weight is trained."""

from __future__ import annotations

from typing import Any

from sonde.tune.config import MethodConfig
from sonde.tune.method import TransformersMethod


class Method(TransformersMethod):
    def prepare(self, model: Any, config: MethodConfig) -> Any:
        return model.requires_grad_(True)
