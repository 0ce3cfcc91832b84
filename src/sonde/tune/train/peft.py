"""Adapters of PEFT around a model."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from sonde.errors import MissingPackageError, UsageError
from sonde.tune.config import MethodConfig
from sonde.tune.method import TransformersMethod


class PeftMethod(TransformersMethod):
    """A method that is a configuration of PEFT."""

    is_adapter = True

    @abstractmethod
    def adapter(self, peft: Any, config: MethodConfig) -> Any:
        """PEFT's configuration."""

    def prepare(self, model: Any, config: MethodConfig) -> Any:
        peft = import_peft()
        if isinstance(model, peft.PeftModel):
            raise UsageError(
                "the model has adapters already. Merge them first (model.merge_and_unload()), or give the base model."
            )
        try:
            return peft.get_peft_model(model, self.adapter(peft, config))
        except ValueError as error:  # no such module, a model that PEFT does not know
            names = ", ".join(
                sorted({name.rpartition(".")[2] for name, m in model.named_modules() if _is_linear(m)})[:12]
            )
            raise UsageError(f"{error} Linear layers of this model: {names}. Choose with target_modules.") from error


def import_peft() -> Any:
    try:
        import peft
    except ImportError:
        raise MissingPackageError("peft", "tune", "tuning adapters") from None
    return peft


def _is_linear(module: Any) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")
