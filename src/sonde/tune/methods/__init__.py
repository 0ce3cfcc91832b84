"""Fine-tuning methods. Each file holds one class `Method`; its name is the value of `training_method`."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from sonde.errors import UnknownNameError

if TYPE_CHECKING:
    from sonde.tune.method import FineTuningMethod


def method_names() -> list[str]:
    """Every file here; none of them is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check_name(method: str) -> None:
    """Reject an unknown method, without importing any."""
    if method not in method_names():
        raise UnknownNameError("training method", method, method_names())


def find_method(method: str | FineTuningMethod) -> FineTuningMethod:
    """A method by name, or your own."""
    if not isinstance(method, str):
        return method
    check_name(method)
    found: FineTuningMethod = import_module(f"sonde.tune.methods.{method}").Method()
    return found
