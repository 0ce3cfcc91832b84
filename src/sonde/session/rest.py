"""Rest: between two recorded steps sonde only counts. Hooks on modules are removed and taps of functions do nothing.

What remains in such a step is one hook before the model runs, which tells values logged before the step from those
logged after it, and the hooks of the optimizer. An evaluation is followed as usual. Everything that is not part of a
plain training step (another optimizer, another thread, a request for a snapshot) ends the rest.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from sonde.probe.guards import is_capturing, is_observable
from sonde.session.training.thread import TrainingThread

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from sonde.session.model.watched import WatchedModel


_MIN_STEPS: Final = 2
"""A shorter rest would cost more than it saves."""


_STEP_S: Final = 20e-6
"""What counting a step takes, in addition to what is measured: the calls of our hooks. `benchmarks/hooks.py`."""


class RestHost(Protocol):
    """Knows what the next steps record. No method may raise."""

    def next_recorded(self, training: TrainingThread, after: int) -> int:
        """The first step after this one that may record something or has a snapshot; `after + 1` if that is not
        known."""

    def modes(self, training: TrainingThread) -> dict[int, bool]:
        """By `id` of a watched model: whether it is in training mode."""

    def resting(self, *, is_on: bool) -> None:
        """Pause the taps, or resume them."""

    def evaluated(self, training: TrainingThread, step: int) -> None:
        """An evaluation after this step is over."""


class Rest:
    """The rest of one session. Its hooks run on the training thread, and take a few microseconds per step."""

    def __init__(self, host: RestHost) -> None:
        self._host = host
        self.is_on = False
        self._training: TrainingThread | None = None
        self._thread = 0
        self._until = 0
        """The first step that may record something again."""
        self._is_evaluating = False
        """Whether the taps are back for an evaluation."""
        self._has_evaluated = False
        """Whether there was one in this rest."""
        self._began_s = self._own_s = 0.0
        self._first = 0
        self._modes: dict[int, bool] = {}
        """By model: whether it is trained in training mode."""

    # ---------------------------------------------------------------------------------------------------- begin and end

    def begin(self, training: TrainingThread, step: int) -> None:
        """Called when a step is over: rest if the next ones record nothing."""
        if self.is_on or not training.steps.is_plain:
            return
        until = self._host.next_recorded(training, step)
        if until <= step + _MIN_STEPS:
            return
        training.steps.rest()
        self._training, self._thread, self._until = training, threading.get_ident(), until
        self._began_s, self._own_s, self._first = time.perf_counter(), 0.0, step
        self._has_evaluated = False
        self._modes = self._host.modes(training)
        self._host.resting(is_on=True)
        self.is_on = True

    def disturb(self) -> None:
        """Called for something that a resting step does not expect, by any thread: record again, at once or from the
        next step on."""
        self._until = 0
        if threading.get_ident() == self._thread:
            self.wake()

    def wake(self) -> None:
        """Record again; without effect if it does not rest."""
        training = self._training
        if not self.is_on or training is None:
            return
        self.is_on = self._is_evaluating = False
        self._host.resting(is_on=False)
        num_steps = training.steps.number - self._first - (not training.steps.is_over)
        seconds = time.perf_counter() - self._began_s
        training.rested(num_steps, seconds, self._own_s + num_steps * _STEP_S, is_plain=not self._has_evaluated)
        training.steps.wake()

    # ------------------------------------------------------------------------------------------------------------ hooks

    def model_begins(self, model: WatchedModel) -> bool:
        """Whether nothing else is to be done for this call of a model."""
        training = self._training
        if not self.is_on or training is None or model.training is not training:
            return False
        if not torch.is_grad_enabled():
            if not self._is_evaluating:
                self._is_evaluating = self._has_evaluated = True
                self._host.resting(is_on=False)
            return False
        module = model.names.model()
        is_plain = module is not None and module.training == self._modes.get(id(model)) and is_observable()
        if not is_plain or threading.get_ident() != self._thread or self._is_due():
            self.wake()
            return False
        if self._is_evaluating:
            self._is_evaluating = False
            self._host.evaluated(training, training.steps.last)
            self._host.resting(is_on=True)
        training.steps.enter_resting()
        return True

    def begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
        """Whether this call of `step` needs nothing but counting."""
        training = self._training
        if not self.is_on or training is None:
            return False
        if threading.get_ident() != self._thread or not training.steps.is_usual(optimizer) or is_capturing():
            self.wake()
            return False
        if len(args) > 1 or kwargs:  # a closure runs the model inside the step
            training.steps.enter_resting()
        return True

    def ends(self, optimizer: Optimizer) -> None:
        """Count this call, unless it is of no interest."""
        training = self._training
        if training is None:
            return
        began_s = time.perf_counter()
        is_counted = training.steps.step_resting(optimizer)
        self._own_s += time.perf_counter() - began_s
        if is_counted and self._is_due():
            self.wake()

    def _is_due(self) -> bool:
        """Whether a step is over and the next one may record something."""
        steps = self._training.steps if self._training is not None else None
        return steps is not None and steps.is_over and steps.number + 1 >= self._until
