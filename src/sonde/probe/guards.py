"""Conditions under which a hook must do nothing, and the wrapper of every hook, which lets only Ctrl-C through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch

Hook = Callable[..., None]


def protected(hook: Hook, on_error: Callable[[str, Exception], None], name: str) -> Callable[..., None]:
    """The hook, unable to harm its caller.

    While tracing, a compiler sees only the first line: nothing is recorded there, so the graph stays whole and none of
    our Python state becomes a guard.
    """

    def run(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        is_grad_enabled = torch.is_grad_enabled()
        try:
            hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - the one place: our failure must not end their training
            torch._C._set_grad_enabled(is_grad_enabled)
            on_error(name, error)

    return run


def is_observable(*, in_inference: bool = False) -> bool:
    """Whether tensors seen now are real values of the real forward pass; with `in_inference`, also in inference mode.

    Not while tracing or under a function transform, where there are no values; not while the backward pass recomputes a
    checkpointed segment, which was seen before; not while a CUDA graph is captured, where nothing runs.
    """
    return (
        torch._C._current_graph_task_id() == -1
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and (in_inference or not torch.is_inference_mode_enabled())
        and not is_capturing()
    )


def is_in_backward() -> bool:
    """Whether this runs inside a backward pass; on a GPU that is in one of autograd's threads."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_capturing() -> bool:
    initialized: Callable[[], bool] = torch.cuda.is_initialized
    return initialized() and torch.cuda.is_current_stream_capturing()


def is_in_checkpoint() -> bool:
    """Whether this forward runs inside a reentrant checkpoint, which turns gradients off although it trains."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT_FORWARD:
            return True
        frame = frame.f_back
    return False


def _checkpoint_forward() -> Any:
    from torch.utils.checkpoint import CheckpointFunction

    return CheckpointFunction.forward.__code__


_CHECKPOINT_FORWARD = _checkpoint_forward()


class quiet:  # noqa: N801 - reads as a statement: `with quiet():`
    """No autograd and no autocast around our computation: both would change it, or keep the graph alive.

    The user's modes do not see it either: a counter of operations must count only theirs, and a selective checkpoint,
    which saves results in order, would pass our results to their recomputation.
    """

    __slots__ = ("_grad", "_modes")

    def __enter__(self) -> None:
        # Every hook runs this: a mode that is not active is not switched off.
        modes: list[Any] = []
        if _function_modes():
            modes.append(torch._C.DisableTorchFunction())
        if _dispatch_modes():
            modes.append(torch._C._DisableTorchDispatch())
        if _is_autocast():
            modes.append(torch._C._DisableAutocast())
        for mode in modes:
            mode.__enter__()
        self._modes = modes
        # Last, because it cannot fail: after an error here, the user would continue without gradients.
        self._grad = _is_grad_enabled()
        _set_grad_enabled(False)

    def __exit__(self, *exc: object) -> None:
        _set_grad_enabled(self._grad)
        for mode in reversed(self._modes):
            mode.__exit__(*exc)


_function_modes: Final[Callable[[], int]] = torch._C._len_torch_function_stack
_dispatch_modes: Final[Callable[[], int]] = torch._C._len_torch_dispatch_stack
_is_autocast: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled
_is_grad_enabled: Final[Callable[[], bool]] = torch.is_grad_enabled
_set_grad_enabled: Final[Callable[[bool], None]] = torch._C._set_grad_enabled
