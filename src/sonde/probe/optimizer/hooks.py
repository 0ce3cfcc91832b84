"""Calls of `optimizer.step()`, from torch's global step hooks: nothing is attached to the optimizer.

One pair of hooks serves all models of a session, so a call is announced once, however many of them it trains.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sonde.probe.guarded import attempt
from sonde.probe.guards import is_capturing, protected
from sonde.probe.optimizer.compiled_steps import beginning, ending, follow, unfollow
from sonde.probe.optimizer.graph_replays import GraphReplays

_TORCH_FILE: Final = register_optimizer_step_pre_hook.__code__.co_filename


@dataclass(slots=True, eq=False)
class Call:
    """One call of `optimizer.step()`, while it runs. Holds the user's optimizer, so it must not be kept."""

    optimizer: Optimizer
    has_closure: bool = False
    """Whether gradients are computed inside the step (LBFGS, Lightning), and must be read after it."""
    is_skipped: bool = False
    """Whether a GradScaler skips the step: a step that changes nothing."""
    is_made: bool = False
    """Whether nothing of ours ran before the step, which is inside one graph. Gradients may be gone, or another
    step's."""
    is_retry: bool = False
    """Whether the previous call of the same optimizer raised."""
    has_inner: bool = False
    """Whether steps of base classes, or of optimizers that it wraps, run inside of it."""
    counted_by: list[Any] = field(default_factory=list)
    """The counters that know that it has started."""
    thread: int = field(default_factory=threading.get_ident)
    """Two threads may call one optimizer, or step one model, at the same time."""
    num_inside: int = 0
    """Steps of base classes that have started inside of it: torch calls hooks for them too."""
    listeners: Sequence[Listener] = ()
    """The listeners it concerns; known once they were asked."""
    steps: dict[Any, Any] = field(default_factory=dict)
    """State of each listener until the step is over."""

    @property
    def is_unusual(self) -> bool:
        """Whether the hooks of torch alone do not show that a step is made."""
        return self.is_skipped or self.is_made or self.is_retry or self.has_inner


class StepCounter(Protocol):
    """Counts steps while nothing is recorded. Must not raise."""

    @property
    def is_on(self) -> bool: ...

    def begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether this call needs nothing but counting."""

    def ends(self, optimizer: Optimizer) -> None:
        """Count it."""

    def wake(self) -> None:
        """A step that this counter cannot see is about to be reported."""


class Listener(Protocol):
    """Receives the calls of some optimizers. Must not raise."""

    def is_concerned(self, optimizer: Optimizer) -> bool: ...

    def captured(self) -> None:
        """A step of one of them was captured into a CUDA graph."""

    def before(self, call: Call) -> None: ...

    def after(self, call: Call) -> None: ...

    def failed(self, call: Call) -> None:
        """It raised, and the user has caught that."""


def _nothing(call: Call) -> None:
    """No counting."""


def _no_one(optimizer: Optimizer, where: str) -> None:
    """No reports of unseen steps."""


class OptimizerHooks:
    """Notifies listeners of calls of `step`. `on_begin` is called before all of them and `on_end` after: these count.

    Also a `Follower`: calls in compiled code are reported like all others. `on_unseen` gets an optimizer of which some
    steps cannot be seen, and where they are made. `timed` surrounds our work."""

    def __init__(
        self,
        on_error: Callable[[str, Exception], None],
        *,
        on_begin: Callable[[Call], None] = _nothing,
        on_end: Callable[[Call], None] = _nothing,
        on_unseen: Callable[[Optimizer, str], None] = _no_one,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.on_error, self.on_begin, self.on_end, self._timed = on_error, on_begin, on_end, timed
        self.begins = protected(self._pre, on_error, "optimizer pre hook")
        self.ends = protected(self._post, on_error, "optimizer post hook")
        self.made = protected(self._made, on_error, "compiled optimizer step")
        self._replays = GraphReplays(self.made, on_error)
        self._on_unseen = on_unseen
        self._listeners: list[Listener] = []
        self._open: dict[tuple[int, int], Call] = {}
        """Keyed by thread and optimizer."""
        self._handles: list[Any] = []
        self.counter: StepCounter | None = None
        self.num_calls = 0
        """Calls of `step` of all optimizers of the process, those that nothing listens to included."""

    def add(self, listener: Listener) -> None:
        if not self._listeners:
            self._handles = [
                register_optimizer_step_pre_hook(beginning(self.begins)),
                register_optimizer_step_post_hook(ending(self.ends)),
            ]
            follow(self)
        self._listeners = [*self._listeners, listener]

    def remove(self, listener: Listener) -> None:
        self._listeners = [other for other in self._listeners if other is not listener]
        if not self._listeners:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._open.clear()
            unfollow(self)
            self._replays.detach()

    def skip(self, optimizer: Optimizer) -> None:
        """A scaler skipped its step after unscaling the gradients."""
        self._wake()
        call = Call(optimizer, is_skipped=True)
        if not is_capturing() and self._begin(call):
            self._end(call)

    def begun(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self.begins(optimizer, (), {"closure": True} if has_closure else {})

    def ended(self, optimizer: Optimizer) -> None:
        self.ends(optimizer, (), {})

    def _made(self, optimizer: Optimizer) -> None:
        self._wake()
        call = Call(optimizer, is_made=True)
        if not is_capturing() and self._begin(call):
            self._end(call)

    def unseen(self, optimizer: Optimizer) -> None:
        with attempt(self.on_error, "compilation of an optimizer step"):
            if self._concerned(optimizer):
                self._on_unseen(optimizer, "compiled code")

    def _wake(self) -> None:
        if self.counter is not None:
            self.counter.wake()

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.num_calls += 1
        if self.counter is not None and self.counter.is_on and self.counter.begins(optimizer, args, kwargs):
            return
        if self._open and self._is_inside(optimizer):
            return
        call = Call(optimizer)
        key = call.thread, id(optimizer)
        failed = self._open.get(key)
        self._open[key] = call  # before anything can fail: a call that is not open is not counted at its end
        call.is_retry = failed is not None
        call.has_closure = _closure(optimizer, args, kwargs) is not None
        with self._timed():
            self._open_call(call, key, failed)

    def _open_call(self, call: Call, key: tuple[int, int], failed: Call | None) -> None:
        if is_capturing():
            del self._open[key]
            self._captured(call.optimizer)
            return
        if failed is not None:
            for listener in failed.listeners:
                listener.failed(failed)
        if not self._begin(call):
            del self._open[key]

    def _captured(self, optimizer: Optimizer) -> None:
        concerned = self._concerned(optimizer)
        for listener in concerned:
            listener.captured()
        if concerned and not self._replays.captured(optimizer):
            self._on_unseen(optimizer, "a CUDA graph")

    def _post(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        key = threading.get_ident(), id(optimizer)
        call = self._open.get(key)
        if call is None:
            if self.counter is not None and self.counter.is_on:
                self.counter.ends(optimizer)
            return
        if call.num_inside:
            call.num_inside -= 1
            return
        del self._open[key]  # before anything can fail: the next call finds that this one has stepped
        with self._timed():
            # If the search for listeners failed before the step, there are none: the step counts all the same.
            call.listeners = call.listeners or self._concerned(optimizer)
            if call.listeners:
                self._end(call)

    def _begin(self, call: Call) -> bool:
        """Whether it concerns any listener."""
        call.listeners = self._concerned(call.optimizer)
        if call.listeners:
            self.on_begin(call)
            for listener in call.listeners:
                listener.before(call)
        return bool(call.listeners)

    def _end(self, call: Call) -> None:
        try:
            for listener in call.listeners:
                listener.after(call)
        finally:
            self.on_end(call)

    def _concerned(self, optimizer: Optimizer) -> list[Listener]:
        return [listener for listener in self._listeners if listener.is_concerned(optimizer)]

    def _is_inside(self, optimizer: Optimizer) -> bool:
        """Whether this step is part of one in progress: of a base class, or of an optimizer that another one wraps. The
        outer one is measured, and everything that happens in it."""
        running = _running()
        if optimizer in running:
            running.remove(optimizer)  # the step that starts now
        here = threading.get_ident()
        for call in [call for call in tuple(self._open.values()) if call.thread == here]:
            if call.optimizer is optimizer and optimizer in running:
                call.num_inside += 1
                call.has_inner = True
                return True
            if call.optimizer in running and not _are_apart(call.optimizer, optimizer):
                call.has_inner = True
                return True
        return False


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _running() -> list[Any]:
    """The optimizers that are stepping now, innermost first: read from the frames of torch's step wrapper."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _TORCH_FILE:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found


def _are_apart(one: Optimizer, other: Optimizer) -> bool:
    return {id(p) for p in parameters_of(one)}.isdisjoint(id(p) for p in parameters_of(other))


def _closure(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The closure passed to `step`; torch passes the optimizer itself as the first argument."""
    given = [argument for argument in args if argument is not optimizer]
    return given[0] if given else kwargs.get("closure")
