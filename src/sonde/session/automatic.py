"""Finds the models of a program that does not name them: whatever is called for training and has parameters."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sonde.probe.guards import is_observable, protected
from sonde.session.session import Session

_SEARCH_STEPS: Final = 50
"""After this many steps every model of an ordinary program has been seen, and looking for more would only cost."""


class Automatic:
    """Watches each outermost module that runs with gradients on. Its submodules are its own, not models."""

    def __init__(self, session: Session, **options: Any) -> None:
        self.session, self.options = session, options
        self._roots: list[weakref.ref[nn.Module]] = []
        self._num_of: dict[str, int] = {}
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handle: Any = register_module_forward_pre_hook(protected(self._seen, session.breaker, "model search"))
        session.on_finish(self.detach)

    def detach(self) -> None:
        self._handle.remove()

    def _seen(self, module: nn.Module, args: Any) -> None:
        if module in self._known or self.session.step_number > _SEARCH_STEPS:
            return
        if not torch.is_grad_enabled() or not is_observable():
            return
        if _is_symbolic(args):
            return
        self._known.update(module.modules())
        if getattr(module, "train_function", None) is not None:
            # Keras on torch, inside `fit`: its adapter records that. torch does not know all its layers.
            self._known.update(module._flatten_layers())  # type: ignore[operator]
            return
        if any(p.requires_grad for p in module.parameters()):
            # The second model and those after it carry their class's name, so that two "layers.0" stay apart.
            prefix = self._named(type(module).__name__) if self._roots else ""
            self._roots.append(weakref.ref(module))
            self.session.watch(module, prefix=prefix, **self.options)

    def _named(self, name: str) -> str:
        """`Sequential.`, and of the next one `Sequential_2.`"""
        self._num_of[name] = self._num_of.get(name, 0) + 1
        return f"{name}." if self._num_of[name] == 1 else f"{name}_{self._num_of[name]}."


def _is_symbolic(args: Any) -> bool:
    """Keras on torch calls each layer once without values, while a model is put together."""
    flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]
    return any(type(x).__name__ == "KerasTensor" for x in flat)
