"""Finds the models of a program that does not name them: modules with parameters that run for training."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sonde.probe.guards import is_observable, protected
from sonde.session.model.watched import WatchedModel
from sonde.session.session import Session

_SEARCH_STEPS: Final = 50
"""Number of steps after which every model of an ordinary program has been seen, and searching for more would only cost
time."""


def automatic_of(session: Session) -> Automatic | None:
    """The model finder of this session; None once the program watches a model itself."""
    return _found.get(session)


class Automatic:
    """Watches each outermost module that runs with gradients on, until the program watches a model itself. Submodules
    are part of their model and are not watched separately."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._own: list[WatchedModel] = []
        self._num_of: dict[str, int] = {}
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._is_watching = False
        self._lock = threading.RLock()
        """Two threads may start their models at the same time."""
        self._handle: Any = register_module_forward_pre_hook(
            protected(self.seen, session.recording.breaker, "model search")
        )
        session.on_watch = self.give_way
        session.recording.at_finish.append(self.detach)
        _found[session] = self

    def detach(self) -> None:
        self._handle.remove()

    def seen(self, module: nn.Module, args: Any) -> None:
        """Called when a module is about to run."""
        if module in self._known or self.session.step_number > _SEARCH_STEPS:
            return
        if not _is_training(args):
            return
        with self._lock:
            if module in self._known:
                return
            self._known.update(module.modules())
            if _is_keras(module):
                # Keras on torch, inside `fit`: the Keras adapter records it. torch does not know all its layers.
                self._known.update(module._flatten_layers())  # type: ignore[operator]
            elif _has_trainable(module):
                self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        # From the second model on, names start with the class name, so that two "layers.0" stay apart.
        prefix = self._named(type(module).__name__) if self._own else ""
        self._is_watching = True
        try:
            self.session.watch(module, prefix=prefix)
        finally:
            self._is_watching = False
        self._own.append(self.session.steps.models[-1])

    def give_way(self) -> None:
        """Stop searching: the program watches a model itself and decides what is recorded."""
        if self._is_watching:
            return
        self.detach()
        self.session.on_watch = None
        _found.pop(self.session, None)
        self.session.steps.unwatch([watching for watching in self._own if watching in self.session.steps.models])

    def _named(self, name: str) -> str:
        """`Sequential.` for the first model of a class, `Sequential_2.` for the next."""
        self._num_of[name] = self._num_of.get(name, 0) + 1
        return f"{name}." if self._num_of[name] == 1 else f"{name}_{self._num_of[name]}."


_found: Final[weakref.WeakKeyDictionary[Session, Automatic]] = weakref.WeakKeyDictionary()


class FirstModel:
    """Calls `found` when a trainable module is about to run for the first time, then stops searching."""

    def __init__(self, found: Callable[[nn.Module, Any], None], on_error: Callable[[str, Exception], None]) -> None:
        self._found = found
        self._handle: Any = register_module_forward_pre_hook(protected(self._seen, on_error, "model search"))

    def detach(self) -> None:
        self._handle.remove()

    def _seen(self, module: nn.Module, args: Any) -> None:
        if _is_training(args) and not _is_keras(module) and _has_trainable(module):
            self.detach()
            self._found(module, args)


def _is_training(args: Any) -> bool:
    return torch.is_grad_enabled() and is_observable() and not _is_symbolic(args)


def _is_keras(module: nn.Module) -> bool:
    return getattr(module, "train_function", None) is not None


def _has_trainable(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _is_symbolic(args: Any) -> bool:
    """Keras on torch calls each layer once without values while a model is built."""
    flat = [x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,))]
    return any(type(x).__name__ == "KerasTensor" for x in flat)
