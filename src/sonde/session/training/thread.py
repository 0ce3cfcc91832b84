"""What one thread of the program trains: its models and its steps, and what is done at the end of each step.

Everything here may fail, part by part, without keeping the rest from being done or the step from being counted.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from sonde.probe.guarded import attempt
from sonde.session.training.budget import BudgetController
from sonde.session.training.count import Steps
from sonde.session.training.writer import StepWriter

if TYPE_CHECKING:
    import weakref

    from sonde.session.model.watched import WatchedModel
    from sonde.session.session import Session

_FACTS_EVERY: Final = 100


class TrainingThread:
    """A `StepHost`: acts on what `Steps` finds."""

    def __init__(self, session: Session, first: int) -> None:
        self.session, self.breaker = session, session.breaker
        self.steps: Steps = Steps(first, self)
        self.step_writer = StepWriter(session.writer, self.steps)
        self.governing: BudgetController = BudgetController(session)
        self.thread: weakref.ref[Any] | None = None
        """The thread itself, as `TrainingThreads` knows it; None until one trains."""
        self.actor: weakref.ref[Any] | None = None
        """The one that has last done something with its models, which may be another."""
        self.is_abandoned = False
        """All its models were found to be trained elsewhere."""
        self.seen_at = first
        """The furthest step of the session when it last made one."""
        self._began_s = time.perf_counter()
        self._described = -1
        """The step in which models were described last."""

    @property
    def is_alive(self) -> bool:
        """Whether a thread trains here that has not ended."""
        return self.thread is not None and self.thread() is not None

    @property
    def watched_models(self) -> list[WatchedModel]:
        """The models it trains."""
        return [watching for watching in self.session.watched_models if watching.training is self]

    def optimizers(self) -> set[int]:
        return {id(optimizer) for watching in self.watched_models for optimizer in watching.optimizers.watched}

    # ---------------------------------------------------------------------------------------------- a step, in order

    def step_begins(self, step: int) -> None:
        for watching in self.watched_models:
            with attempt(self.breaker, "schedule"):
                watching.begin_step(step)
        if self.session.snapshots.are_of(self):
            with attempt(self.breaker, "schedule of snapshots"):
                self.session.snapshots.begin_step(step)

    def optimizers_stepped(self, step: int) -> None:
        self.emit(step)
        self._end_snapshot()
        if step != self._described:  # again at the end: in the first step more of them may follow
            self._described = step
            with attempt(self.breaker, "structure of the model"):
                self._describe_models()

    def step_ended(self, step: int) -> None:
        now = time.perf_counter()
        wall_s, self._began_s = now - self._began_s, now
        self.emit(step)
        self.session.position.step_made()
        self.session.threads.step_ended(self)
        with attempt(self.breaker, "budget"):
            self._keep_to_budget(step, wall_s)
        with attempt(self.breaker, "structure of the model"):
            self._describe_models()
        if step % _FACTS_EVERY == 0:
            with attempt(self.breaker, "facts"):
                self.session.note_facts()

    def emit(self, step: int) -> None:
        """Hand what was measured to the writer, as a part of this step."""
        for watching in self.watched_models:
            with attempt(self.breaker, "handing over"):
                watching.emit(step)
        data = self.session.data
        if data is not None and data.thread is self:
            with attempt(self.breaker, "data inspection"):
                data.emit(step)

    def sweep(self) -> None:
        """The user ends the step, and no optimizer is there to tell of: take what is there now."""
        with self.steps.lock:
            watched_models = self.watched_models
            for watching in watched_models:
                # A thread that has not begun yet may own a model that was not run: reading its gradients while that
                # thread clears them would crash torch.
                if watching.has_run or len(watched_models) == 1 or watching.watched_in is self.thread:
                    watching.is_trained = True
                    with attempt(self.breaker, "step"):
                        watching.sweep()
            self._end_snapshot()

    def finish(self) -> None:
        """No step follows."""
        with self.steps.lock:
            with attempt(self.breaker, "finish"):
                self.steps.finish()
            if self.steps.is_over:
                with attempt(self.breaker, "finish"):
                    self.steps.close()
            self.emit(self.steps.number)

    # ------------------------------------------------------------------------------------------------------- inside

    def _end_snapshot(self) -> None:
        if self.session.snapshots.are_of(self):
            with attempt(self.breaker, "snapshot"):
                self.session.snapshots.step_over()

    def _keep_to_budget(self, step: int, wall_s: float) -> None:
        data = self.session.data
        if data is not None and data.thread is self:
            # Batches are told apart in every step, which nothing thins out.
            self.governing.meter.add("inspect" if data.is_inspecting else "", data.own_s)
            data.own_s = 0.0
        self.governing.end_step(step, wall_s)

    def _describe_models(self) -> None:
        """model.json, if what it says has changed."""
        watched_models = self.watched_models
        if watched_models:
            from sonde.session.model.structure import write_structure

            write_structure(self.session, watched_models)
