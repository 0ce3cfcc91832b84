"""The steps of a model's optimizers: which optimizers belong to it, and which of its parameters they train.

Before the step, gradients are what the optimizer will use: accumulated, averaged, unscaled and clipped, except that a
fused optimizer under GradScaler still has them scaled (`grad_scale`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sonde.probe.guarded import attempt
from sonde.probe.guards import quiet
from sonde.probe.model import ModelNames, NamedParameter
from sonde.probe.optimizer.clip import Clips
from sonde.probe.optimizer.hooks import Call, OptimizerHooks, parameters_of
from sonde.probe.optimizer.scaler import loss_scale
from sonde.probe.outputs import is_plain_tensor
from sonde.probe.sharded import is_readable, placed


@dataclass(slots=True)
class OptimizerStep:
    """One call of `optimizer.step()`, while it runs. Holds the user's tensors, so it must not be kept."""

    optimizer: Optimizer
    number: int
    """The number of this optimizer among the watched ones."""
    names: list[NamedParameter]
    params: list[Tensor]
    grad_scale: Tensor | None = None
    """Gradients are still multiplied by this (fused optimizer under GradScaler)."""
    found_inf: Tensor | None = None
    """Non-zero if this step will be skipped."""
    loss_scale: Tensor | None = None
    """The factor by which a GradScaler has multiplied the loss."""
    has_closure: bool = False
    """Whether gradients are computed inside the step (LBFGS, Lightning), and must be read after it."""
    is_made: bool = False
    """Whether it is already over: parameters are those after it, and gradients may be another step's."""
    clips: Clips = field(default_factory=Clips)
    """The clips of the gradients; known once they are computed."""
    unreadable: list[tuple[NamedParameter, str]] = field(default_factory=list)
    replicas: list[tuple[NamedParameter, Tensor]] = field(default_factory=list)
    """Parameters that another rank records: it holds the same part."""
    is_sharded: bool = False
    """Whether some of the parameters are parts of tensors that several ranks hold together."""
    keys: dict[tuple[str, str], Any] = field(default_factory=dict)
    """The sink's keys for `names`; valid as long as the names stay the same."""
    parts: list[Any] = field(default_factory=list)
    """Results from before the step that are needed after it."""
    tables: list[Any] = field(default_factory=list)
    """Measurements before the step, discarded if the step fails."""
    measuring: Iterator[None] | None = None
    """Advanced once before the step, and once after it."""

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
        take_clips: Callable[[list[Tensor]], Clips] = lambda _: Clips(),
        on_failed: Callable[[OptimizerStep], None] | None = None,
        on_unnamed: Callable[[Optimizer], None] | None = None,
        hooks: OptimizerHooks | None = None,
    ) -> None:
        self.names, self.on_error = names, on_error
        self.adopts = optimizers is None
        """If no optimizer was named, or none of those is left, any that steps a parameter of this model counts."""
        self.numbers: dict[int, tuple[weakref.ref[Optimizer], int]] = {}
        self._rosters: dict[int, Roster] = {}
        for optimizer in optimizers or []:
            self._number(optimizer)
        self.is_wanted, self.on_before, self.on_after = is_wanted, on_before, on_after
        self.take_clips, self.on_failed, self.on_unnamed = take_clips, on_failed, on_unnamed
        self._unnamed: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers that were not named, each checked once."""
        self.num_captured = 0
        """Optimizers with steps in a CUDA graph: no hook sees its replays."""
        self._strangers: dict[int, frozenset[int]] = {}
        """Parameters of each optimizer that do not belong to this model, so that the model is not searched for them
        again."""
        self._measured: Call | None = None
        """The call that is being measured. When two threads step one model at the same time, only one is measured."""
        self._lock = threading.Lock()
        self.hooks = hooks or OptimizerHooks(on_error)
        self.hooks.add(self)

    def detach(self) -> None:
        self.hooks.remove(self)

    @property
    def num_watched(self) -> int:
        """Stop waiting for an optimizer that is gone."""
        return sum(ref() is not None for ref, _ in self.numbers.values())

    @property
    def has_unnamed(self) -> bool:
        """Whether an optimizer that was not named has stepped: its steps do not count."""
        return len(self._unnamed) > 0

    @property
    def watched(self) -> list[Optimizer]:
        """The optimizers that still exist, in order of their numbers."""
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
        self.adopts = True  # the named ones are gone: whichever steps now has replaced them
        self._look_for_strangers(optimizer)
        return self._number(optimizer) if any(self.names.parameter(p) for p in parameters_of(optimizer)) else None

    def _notice(self, optimizer: Optimizer) -> None:
        """An optimizer that was not named and still steps this model may have replaced a named one."""
        if optimizer in self._unnamed:
            return
        self._unnamed.add(optimizer)
        if self.on_unnamed is not None and any(self.names.parameter(p) for p in parameters_of(optimizer)):
            self.on_unnamed(optimizer)

    def _look_for_strangers(self, optimizer: Optimizer) -> None:
        """Read the model's names again if there are new parameters: they may have been replaced."""
        strangers = frozenset(id(p) for p in parameters_of(optimizer) if self.names.parameter(p) is None)
        if strangers and strangers != self._strangers.get(id(optimizer)):
            self.names.refresh()
            strangers = frozenset(id(p) for p in parameters_of(optimizer) if self.names.parameter(p) is None)
        self._strangers[id(optimizer)] = strangers

    # --------------------------------------------------------------------------------------------------- hook callbacks

    def is_concerned(self, optimizer: Optimizer) -> bool:
        return self._find(optimizer) is not None

    def captured(self) -> None:
        self.num_captured += 1

    def before(self, call: Call) -> None:
        with attempt(self.on_error, "optimizer pre hook"):
            number = self._find(call.optimizer)
            if number is not None and self._begin(call):
                call.steps[self] = step = self._describe(call, number)
                self.on_before(step)

    def after(self, call: Call) -> None:
        with attempt(self.on_error, "optimizer post hook"):
            step = call.steps.get(self)
            if step is not None:
                if step.has_closure:
                    step.clips = self.take_clips(parameters_of(call.optimizer))
                self.on_after(step)
        if self._measured is call:
            self._measured = None

    def failed(self, call: Call) -> None:
        with attempt(self.on_error, "optimizer pre hook"):
            step = call.steps.get(self)
            if step is not None and self.on_failed is not None:
                self.on_failed(step)

    def _begin(self, call: Call) -> bool:
        """Whether to measure this call: not while another thread's is being measured."""
        with self._lock:
            other = self._measured
            if other is not None and other.thread != call.thread and other.thread in sys._current_frames():
                return False
            self._measured = call
            return True

    def _describe(self, call: Call, number: int) -> OptimizerStep:
        optimizer, params = call.optimizer, parameters_of(call.optimizer)
        step = OptimizerStep(optimizer, number, [], [], has_closure=call.has_closure, is_made=call.is_made)
        if not call.has_closure:
            step.clips = self.take_clips(params)
        step.grad_scale = getattr(optimizer, "grad_scale", None)
        step.found_inf = getattr(optimizer, "found_inf", None)
        step.loss_scale = loss_scale()
        if call.is_skipped:
            with quiet():
                step.found_inf = torch.ones((), device=params[0].device)
        if not self.is_wanted():
            return step
        roster = self._roster(optimizer, params)
        step.names, step.params, step.keys = roster.names, roster.readable(params), roster.keys
        step.unreadable = roster.unreadable
        step.is_sharded = roster.is_sharded
        step.replicas = [(named, params[place]) for named, place in roster.replicas]
        return step

    def _roster(self, optimizer: Optimizer, params: list[Tensor]) -> Roster:
        known = self._rosters.get(id(optimizer))
        if known is None or not known.fits(self.names, params):
            self._look_for_strangers(optimizer)
            known = self._rosters[id(optimizer)] = Roster(self.names, params)
        return known


class Roster:
    """The parameters of one optimizer. Holds no tensor; `keys` caches the sink's keys for them."""

    def __init__(self, names: ModelNames, params: Sequence[Tensor]) -> None:
        self.names: list[NamedParameter] = []
        self.unreadable: list[tuple[NamedParameter, str]] = []
        self.keys: dict[tuple[str, str], Any] = {}
        self.replicas: list[tuple[NamedParameter, int]] = []
        self.is_sharded = False
        self._version = names.version
        self._refs = [weakref.ref(parameter) for parameter in params]
        self._places: list[int] = []
        for place, parameter in enumerate(params):
            named = names.parameter(parameter)
            if named is None or not named.is_selected:
                continue
            if is_plain_tensor(parameter):
                self.names.append(named)
                self._places.append(place)
            elif is_readable(parameter):
                self.is_sharded = True
                if placed(parameter).is_owner:
                    self.names.append(named)
                    self._places.append(place)
                else:
                    self.replicas.append((named, place))
            else:
                self.unreadable.append((named, type(parameter).__name__))

    def fits(self, names: ModelNames, params: Sequence[Tensor]) -> bool:
        """Whether these are still the same parameters, under the same names."""
        return (
            self._version == names.version
            and len(self._refs) == len(params)
            and all(ref() is parameter for ref, parameter in zip(self._refs, params, strict=True))
        )

    def readable(self, params: list[Tensor]) -> list[Tensor]:
        """The parameters in `names`, out of all that the optimizer has."""
        return params if len(self._places) == len(params) else [params[place] for place in self._places]
