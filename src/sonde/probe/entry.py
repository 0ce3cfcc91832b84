"""The moment before the watched model itself runs, through one global hook that lets all other modules pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sonde.probe.guards import is_observable, protected
from sonde.probe.model import ModelNames


class EntryTap:
    """Calls `on_enter` at the beginning of each forward pass that trains, and before that `on_call` of any."""

    def __init__(
        self,
        names: ModelNames,
        on_enter: Callable[[], None],
        on_error: Callable[[str, Exception], None],
        on_call: Callable[[], None] | None = None,
    ) -> None:
        model = names.model

        def begin() -> None:
            if on_call is not None:
                on_call()
            if torch.is_grad_enabled() and is_observable():
                on_enter()

        enter = protected(begin, on_error, "beginning of a forward pass")

        def entered(module: nn.Module, args: Any) -> None:
            # A compiler sees the first word only, and sees it say no.
            if torch.compiler.is_compiling() or module is not model():
                return
            enter()

        self._handle = register_module_forward_pre_hook(entered)

    def detach(self) -> None:
        self._handle.remove()
