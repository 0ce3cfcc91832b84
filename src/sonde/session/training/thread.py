"""One training thread of the program: its step count, its clocks and its budget. It knows no model."""

from __future__ import annotations

import time
import weakref
from typing import Any, Protocol

from sonde.session.recording import Recording
from sonde.session.training.budget import BudgetController
from sonde.session.training.count import Steps
from sonde.session.training.writer import StepWriter


class ThreadHost(Protocol):
    """Acts on the steps of training threads. No method may raise."""

    def optimizers(self, training: TrainingThread) -> set[int]:
        """The watched optimizers that still exist, by `id`."""

    def optimizers_stepped(self, training: TrainingThread, step: int) -> None:
        """Called when all optimizers seem to have stepped. The step stays open for `log` until the next one starts."""

    def step_ended(self, training: TrainingThread, step: int, wall_s: float) -> None:
        """Called when the next step seems to have started."""

    def step_counted(self, training: TrainingThread, step: int) -> None:
        """Called instead of `step_ended` for a step that was only counted."""

    def step_begins(self, training: TrainingThread, step: int) -> None: ...


class TrainingThread:
    """A `StepHost` that times each step, and passes on the events of `Steps`."""

    def __init__(self, recording: Recording, first: int, host: ThreadHost) -> None:
        self._host = host
        self.steps: Steps = Steps(first, self)
        self.step_writer = StepWriter(recording.writer, self.steps)
        self.governing: BudgetController = BudgetController(recording)
        self.thread: weakref.ref[Any] | None = None
        """The thread itself, as `TrainingThreads` knows it; None until one trains."""
        self.actor: weakref.ref[Any] | None = None
        """The thread that last used its models, which may be another."""
        self.is_abandoned = False
        """Whether all its models turned out to be trained elsewhere."""
        self.seen_at = first
        """The furthest step of the session when it last made one."""
        self.described_at = -1
        """The step in which its models were last described."""
        self._has_rested = False
        """Whether the step that ends was only counted."""
        self._began_s = time.perf_counter()

    @property
    def is_alive(self) -> bool:
        """Whether a thread trains here that has not ended."""
        return self.thread is not None and self.thread() is not None

    def optimizers(self) -> set[int]:
        return self._host.optimizers(self)

    def optimizers_stepped(self, step: int) -> None:
        self._host.optimizers_stepped(self, step)

    def step_ended(self, step: int) -> None:
        if self._has_rested:
            self._has_rested = False
            self._host.step_counted(self, step)
            return
        now = time.perf_counter()
        wall_s, self._began_s = now - self._began_s, now
        self._host.step_ended(self, step, wall_s)

    def step_begins(self, step: int) -> None:
        self._host.step_begins(self, step)

    def rested(self, num_steps: int, seconds: float, own_s: float, *, is_plain: bool) -> None:
        """Steps that were only counted are over: their number, their time, our part of it, and whether there was
        nothing else."""
        self._began_s, self._has_rested = time.perf_counter(), self.steps.is_over
        self.governing.rested(self.steps.last, num_steps, seconds, own_s, is_plain=is_plain and self.steps.is_over)
