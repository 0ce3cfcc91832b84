"""Torch hooks that are removed together, under the names of the tools that let their users manage hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import nn


class HookList:
    """Hooks of modules. All of them are removed at the end of a `with` block, or with this object.

    with HookList() as hooks:
        hooks.register_forward_hook(model, lambda module, args, output: print(output.shape))
        model(x)
    """

    def __init__(self) -> None:
        self._handles: dict[nn.Module, list[Any]] = {}

    def register_forward_hook(self, module: nn.Module, hook_fn: Callable[..., Any]) -> None:
        """`hook_fn(module, args, output)` is called after the module."""
        self._handles.setdefault(module, []).append(module.register_forward_hook(hook_fn))

    def register_backward_hook(self, module: nn.Module, hook_fn: Callable[..., Any]) -> None:
        """`hook_fn(module, grad_input, grad_output)` is called when the gradients of the module exist."""
        self._handles.setdefault(module, []).append(module.register_full_backward_hook(hook_fn))

    def remove(self, module: nn.Module) -> None:
        """Remove the hooks of one module."""
        for handle in self._handles.pop(module, []):
            handle.remove()

    def remove_all(self) -> None:
        for module in [*self._handles]:
            self.remove(module)

    def __len__(self) -> int:
        return sum(map(len, self._handles.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_all()

    def __del__(self) -> None:
        self.remove_all()
