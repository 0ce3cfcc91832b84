"""One thread of the program that trains: its count of steps, its clocks and its budget. It knows no model."""

from __future__ import annotations

import time
import weakref
from typing import Any, Protocol

from sonde.session.recording import Recording
from sonde.session.training.budget import BudgetController
from sonde.session.training.count import Steps
from sonde.session.training.writer import StepWriter


class ThreadHost(Protocol):
    """Who acts on the steps of training threads. None of it may raise."""

    def optimizers(self, training: TrainingThread) -> set[int]:
        """Those that are watched and still there, by `id`."""

    def optimizers_stepped(self, training: TrainingThread, step: int) -> None:
        """All of them, as it seems. The step stays open for `log` until the next one shows itself."""

    def step_ended(self, training: TrainingThread, step: int, wall_s: float) -> None:
        """The next one has begun, as it seems."""

    def step_begins(self, training: TrainingThread, step: int) -> None: ...


class TrainingThread:
    """A `StepHost` that measures how long each step took, and passes on what `Steps` finds."""

    def __init__(self, recording: Recording, first: int, host: ThreadHost) -> None:
        self._host = host
        self.steps: Steps = Steps(first, self)
        self.step_writer = StepWriter(recording.writer, self.steps)
        self.governing: BudgetController = BudgetController(recording)
        self.thread: weakref.ref[Any] | None = None
        """The thread itself, as `TrainingThreads` knows it; None until one trains."""
        self.actor: weakref.ref[Any] | None = None
        """The one that has last done something with its models, which may be another."""
        self.is_abandoned = False
        """All its models were found to be trained elsewhere."""
        self.seen_at = first
        """The furthest step of the session when it last made one."""
        self.described_at = -1
        """The step in which its models were described last."""
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
        now = time.perf_counter()
        wall_s, self._began_s = now - self._began_s, now
        self._host.step_ended(self, step, wall_s)

    def step_begins(self, step: int) -> None:
        self._host.step_begins(self, step)
