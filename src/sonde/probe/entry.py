"""The moment before the watched model itself runs, from one global hook that ignores all other modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sonde.probe.guards import is_observable, protected
from sonde.probe.model import ModelNames


class EntryTap:
    """Calls `on_enter` at the start of each training forward pass, and before that `on_call` for any call. Neither, if
    `is_over` says that a call needs nothing more."""

    def __init__(
        self,
        names: ModelNames,
        on_enter: Callable[[], None],
        on_error: Callable[[str, Exception], None],
        on_call: Callable[[], None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        model = names.model

        def begin() -> None:
            if is_over():
                return
            if on_call is not None:
                on_call()
            if torch.is_grad_enabled() and is_observable():
                on_enter()

        enter = protected(begin, on_error, "start of a forward pass")

        def entered(module: nn.Module, args: Any) -> None:
            # A compiler sees only the first condition, which is false for it.
            if torch.compiler.is_compiling() or module is not model():
                return
            enter()

        self._handle = register_module_forward_pre_hook(entered)

    def detach(self) -> None:
        self._handle.remove()
