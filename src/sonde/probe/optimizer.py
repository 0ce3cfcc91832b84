"""Optimizer steps, seen from outside through torch's global step hooks: nothing is attached to the optimizer.

At the pre hook gradients are what the optimizer will use: accumulated, averaged, unscaled and clipped, except that a
fused optimizer under GradScaler still has them scaled (`grad_scale`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sonde.probe.guards import is_capturing, protected, quiet
from sonde.probe.model import ModelNames, NamedParameter
from sonde.probe.roster import Roster
from sonde.probe.scaler import loss_scale

_TORCH_FILE: Final = register_optimizer_step_pre_hook.__code__.co_filename


@dataclass(slots=True)
class OptimizerStep:
    """One call of `optimizer.step()`, as long as it lasts. Holds the user's tensors, so nobody keeps it."""

    optimizer: Optimizer
    number: int
    """Which of the watched optimizers this is."""
    names: list[NamedParameter]
    params: list[Tensor]
    grad_scale: Tensor | None = None
    """Gradients are still multiplied by this (fused optimizer under GradScaler)."""
    found_inf: Tensor | None = None
    """Non-zero when this step will be skipped."""
    loss_scale: Tensor | None = None
    """What a GradScaler has multiplied the loss by."""
    has_closure: bool = False
    """The gradients are made inside the step (LBFGS, Lightning), and are to be read after it."""
    num_inside: int = 0
    """Steps of the classes it inherits from that have begun inside of it: torch calls hooks for them too."""
    clips: dict[int, Any] = field(default_factory=dict)
    """id(param) -> what clipping multiplied its gradient by; a tensor on the gradient's device."""
    unreadable: list[tuple[NamedParameter, str]] = field(default_factory=list)
    keys: dict[tuple[str, str], Any] = field(default_factory=dict)
    """What the sink knows `names` by; lasts as long as they stay the same."""
    parts: list[Any] = field(default_factory=list)
    """What was made of it before the step and is needed after it."""
    tables: list[Any] = field(default_factory=list)
    """What was measured before the step, and is void if the step fails."""

    @property
    def lr(self) -> Any:
        return self.optimizer.param_groups[0].get("lr")


class OptimizerTap:
    """Calls `on_before` and `on_after` around each step of the optimizers of a model."""

    def __init__(
        self,
        names: ModelNames,
        optimizers: list[Optimizer] | None,
        *,
        is_wanted: Callable[[], bool],
        on_before: Callable[[OptimizerStep], None],
        on_after: Callable[[OptimizerStep], None],
        on_error: Callable[[str, Exception], None],
        take_clips: Callable[[list[Tensor]], dict[int, Any]],
        on_failed: Callable[[OptimizerStep], None] | None = None,
        on_unnamed: Callable[[Optimizer], None] | None = None,
    ) -> None:
        self.names = names
        self.adopts = optimizers is None
        """With no optimizer named, or none of those left, any that steps a parameter of this model is one of ours."""
        self.numbers: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._rosters: dict[int, Roster] = {}
        for optimizer in optimizers or []:
            self._number(optimizer)
        self.is_wanted, self.on_before, self.on_after = is_wanted, on_before, on_after
        self.take_clips, self.on_failed, self.on_unnamed = take_clips, on_failed, on_unnamed
        self._unnamed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Others than those that were named, each looked at once."""
        self.num_captured = 0
        """Steps that went into a CUDA graph: what it replays is seen by no hook."""
        self._open: dict[int, OptimizerStep] = {}
        self._strangers: dict[int, frozenset[int]] = {}
        """Parameters of each optimizer that are not this model's, so that the model is not searched for them again."""
        self._handles = [
            register_optimizer_step_pre_hook(protected(self._pre, on_error, "optimizer pre hook")),
            register_optimizer_step_post_hook(protected(self._post, on_error, "optimizer post hook")),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._open.clear()

    @property
    def num_watched(self) -> int:
        """An optimizer that is gone is waited for no longer."""
        return sum(ref() is not None for ref, _ in self.numbers.values())

    @property
    def watched(self) -> list[Optimizer]:
        """Those that are still there, in order of their numbers."""
        known = sorted(self.numbers.values(), key=lambda item: item[1])
        return [optimizer for ref, _ in known if (optimizer := ref()) is not None]

    def _number(self, optimizer: Optimizer) -> int:
        self.numbers = {key: known for key, known in self.numbers.items() if known[0]() is not None}
        self._rosters = {key: roster for key, roster in self._rosters.items() if key in self.numbers}
        taken = {number for _, number in self.numbers.values()}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        self.numbers[id(optimizer)] = (weakref.ref(optimizer), number)
        return number

    def _find(self, optimizer: Optimizer) -> int | None:
        known = self.numbers.get(id(optimizer))
        if known is not None and known[0]() is optimizer:
            return known[1]
        if not self.adopts and self.num_watched:
            self._notice(optimizer)
            return None
        self.adopts = True  # those that were named are gone: whoever steps now has taken their place
        self._look_for_strangers(optimizer)
        return self._number(optimizer) if any(self.names.parameter(p) for p in _parameters(optimizer)) else None

    def _notice(self, optimizer: Optimizer) -> None:
        """One that was not named and steps this model all the same may have taken the place of one that was."""
        if optimizer in self._unnamed:
            return
        self._unnamed.add(optimizer)
        if self.on_unnamed is not None and any(self.names.parameter(p) for p in _parameters(optimizer)):
            self.on_unnamed(optimizer)

    def _look_for_strangers(self, optimizer: Optimizer) -> None:
        """Read the model's names anew if there are parameters not seen before: they may have been replaced since."""
        strangers = frozenset(id(p) for p in _parameters(optimizer) if self.names.parameter(p) is None)
        if strangers and strangers != self._strangers.get(id(optimizer)):
            self.names.refresh()
            strangers = frozenset(id(p) for p in _parameters(optimizer) if self.names.parameter(p) is None)
        self._strangers[id(optimizer)] = strangers

    def _pre(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._open and self._is_inside(optimizer):
            return
        number = self._find(optimizer)
        if number is None:
            return
        if is_capturing():
            self.num_captured += 1
            return
        failed = self._open.get(id(optimizer))
        if failed is not None and self.on_failed is not None:
            self.on_failed(failed)  # it raised, the user caught it, and here is the next
        step = self._describe(optimizer, number)
        step.has_closure = _closure(optimizer, args, kwargs) is not None
        self._open[id(optimizer)] = step
        self.on_before(step)

    def _post(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        step = self._open.get(id(optimizer))
        if step is None:
            return
        if step.num_inside:
            step.num_inside -= 1
            return
        del self._open[id(optimizer)]
        self.on_after(step)

    def skip(self, optimizer: Optimizer) -> None:
        """A scaler kept it from its step, gradients being unscaled already: told as a step that changes nothing."""
        number = self._find(optimizer)
        if number is None or is_capturing():
            return
        step = self._describe(optimizer, number)
        with quiet():
            step.found_inf = torch.ones((), device=_parameters(optimizer)[0].device)
        self.on_before(step)
        self.on_after(step)

    def _is_inside(self, optimizer: Optimizer) -> bool:
        """Whether this step is a part of one that is being made: of the class that an optimizer inherits from, or of an
        optimizer that it wraps. The outer one is measured, and so is all that happens in it."""
        running = _running()
        if optimizer in running:
            running.remove(optimizer)  # the step that begins now
        for step in self._open.values():
            if step.optimizer is optimizer and optimizer in running:
                step.num_inside += 1
                return True
            if step.optimizer in running and not _are_apart(step.optimizer, optimizer):
                return True
        return False

    def _describe(self, optimizer: Optimizer, number: int) -> OptimizerStep:
        params = _parameters(optimizer)
        step = OptimizerStep(optimizer, number, [], [], clips=self.take_clips(params))
        step.grad_scale = getattr(optimizer, "grad_scale", None)
        step.found_inf = getattr(optimizer, "found_inf", None)
        step.loss_scale = loss_scale()
        if not self.is_wanted():
            return step
        roster = self._roster(optimizer, params)
        step.names, step.params, step.keys = roster.names, roster.readable(params), roster.keys
        step.unreadable = roster.unreadable
        return step

    def _roster(self, optimizer: Optimizer, params: list[Tensor]) -> Roster:
        known = self._rosters.get(id(optimizer))
        if known is None or not known.fits(self.names, params):
            self._look_for_strangers(optimizer)
            known = self._rosters[id(optimizer)] = Roster(self.names, params)
        return known


def _running() -> list[Any]:
    """The optimizers whose steps are being made now, innermost first: by the frames of what torch wraps steps in."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _TORCH_FILE:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found


def _are_apart(one: Optimizer, other: Optimizer) -> bool:
    return {id(p) for p in _parameters(one)}.isdisjoint(id(p) for p in _parameters(other))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _closure(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """The closure given to `step`; torch passes the optimizer itself along as the first argument."""
    given = [argument for argument in args if argument is not optimizer]
    return given[0] if given else kwargs.get("closure")
