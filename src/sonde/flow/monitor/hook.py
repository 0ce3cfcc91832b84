"""One forward hook for all modules of the process, which leaves no trace on a model and lives as long as its owner."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook

_COMPILE_WARNING: Final = r"Using `torch\.compile\(module\)` when there are global hooks"


class Owner(Protocol):
    def seen(self, module: nn.Module, args: Any, output: Any) -> None: ...


def attach(owner: Owner) -> weakref.finalize[Any, Any]:
    """Call `owner.seen` after every module; calling the result removes the hook."""
    alive = weakref.ref(owner)

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found = None if torch.compiler.is_compiling() else alive()
        if found is not None:
            found.seen(module, args, output)

    # torch warns that such a hook also fires for a compiled wrapper, which is what we want.
    warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
    handle = register_module_forward_hook(hook, with_kwargs=True)
    return weakref.finalize(owner, _remove, handle, warnings.filters[0])


def _remove(handle: Any, silence: Any) -> None:
    handle.remove()
    if silence in warnings.filters:
        warnings.filters.remove(silence)  # type: ignore[attr-defined]
    # torch forgets to remove this mark, and continues as if there were a hook.
    getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)
