"""`FineTuningMethod`: what is trained, and how a step works. One method, one file in `methods/`; yours anywhere.

`TransformersMethod` and `PeftMethod` are shared by the methods in `methods/`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.schema.packages import require
from sonde.tune.config import MethodConfig


class FineTuningMethod(ABC):
    """A fine-tuning method in three steps."""

    uses_trainer_step: ClassVar[bool] = False
    """Whether transformers' own forward and backward are used instead of `train_step`."""
    is_adapter: ClassVar[bool] = False
    """Whether the base model stays unchanged: checkpoints then leave it out."""

    @abstractmethod
    def setup_training(self, model: nn.Module, config: MethodConfig) -> nn.Module:
        """The model to train, with parameters frozen and modules added."""

    @abstractmethod
    def train_step(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of one micro-batch. If this calls `loss.backward()` itself, the loss may be detached; otherwise the
        trainer calls it. Either way gradients are averaged over the micro-batches of a step, the forward pass runs in
        the precision of the training, and the optimizer steps elsewhere."""

    @abstractmethod
    def save_checkpoint(self, path: str | Path) -> None:
        """Save the trained weights in a format that others can load."""

    def load_options(self, config: MethodConfig) -> dict[str, Any]:
        """Arguments of `from_pretrained` besides a name. Raises if the method cannot work here."""
        return {}

    def load_model(self, name: str, config: MethodConfig) -> Any:
        """The saved model of this name, for methods that load it in their own way; None for transformers' way."""
        return None

    @property
    def can_merge(self) -> bool:
        """Whether `merged` returns a model. Asked after `setup_training`."""
        return False

    def merged(self) -> Any:
        """The whole model with everything trained merged in, to save."""
        raise UsageError(f"{type(self).__name__} cannot merge what it trains; implement can_merge and merged().")


class TransformersMethod(FineTuningMethod):
    """The common part of methods for transformers models."""

    uses_trainer_step = True
    model: Any = None

    def setup_training(self, model: nn.Module, config: MethodConfig) -> nn.Module:
        prepared: nn.Module = self.prepare(model, config)
        self.model = prepared
        return prepared

    @abstractmethod
    def prepare(self, model: Any, config: MethodConfig) -> Any:
        """Freeze parameters and add modules."""

    def train_step(self, batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def save_checkpoint(self, path: str | Path) -> None:
        self.model.save_pretrained(path)

    @property
    def can_merge(self) -> bool:
        """Learned tokens and prefixes are not part of any weight."""
        return not self._has_adapters or hasattr(self.model, "merge_and_unload")

    def merged(self) -> Any:
        """A copy, so that the caller keeps the adapters. Models without separate adapters are whole already."""
        return copy.deepcopy(self.model).merge_and_unload() if self._has_adapters else self.model

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.model, "peft_config")


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
                "the model already has adapters. Merge them first (model.merge_and_unload()), or pass the base model."
            )
        try:
            return peft.get_peft_model(model, self.adapter(peft, config))
        except ValueError as error:  # no such module, or a model that PEFT does not know
            names = ", ".join(
                sorted({name.rpartition(".")[2] for name, m in model.named_modules() if _is_linear(m)})[:12]
            )
            raise UsageError(
                f"{error} Linear layers of this model: {names}. Choose some with target_modules."
            ) from error


def import_peft() -> Any:
    return require("peft", "tune", "Tuning adapters")


def _is_linear(module: Any) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")


def why_unusable(package: str) -> str:
    """Why a package cannot be used here, found by importing it; "" if it can."""
    if find_spec(package) is None:
        return f"{package}, which is not installed (pip install {package})"
    try:
        import_module(package)
    except Exception as error:  # noqa: BLE001 - packages of kernels raise anything where there is no driver
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"{package}, which is installed but cannot be imported here ({reason.rstrip('.')})"
    return ""
