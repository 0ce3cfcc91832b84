"""Assigns models to the threads of the program that train them. Each training thread counts its own steps.

A thread trains a model once it runs a forward pass of it with gradients on, and for certain once it steps one of its
optimizers. Autograd's threads, replicas and evaluations never count as training threads. Almost every program has one
training thread; then this costs a few comparisons per forward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from sonde.session.recording import Recording
from sonde.session.training.budget import facts_of
from sonde.session.training.position import Position
from sonde.session.training.thread import ThreadHost, TrainingThread

if TYPE_CHECKING:
    from sonde.probe.optimizer.hooks import Call
    from sonde.session.model.watched import WatchedModel

_IDLE_STEPS: Final = 1000
"""Number of steps of another thread after which a thread that makes none no longer holds back the step at which a
resumed run starts."""


class _Life:
    """An object freed when its thread ends. Python reuses thread idents, so they cannot identify a thread."""

    __slots__ = ("__weakref__",)


class _Here(threading.local):
    """State of the calling thread."""

    training: TrainingThread | None = None
    """Counts the steps of the models it trained last."""

    def __init__(self) -> None:
        self._life = _Life()
        self.id = weakref.ref(self._life)


class TrainingThreads:
    """The training threads of one session: at least one, more once other threads train other models."""

    def __init__(self, recording: Recording, host: ThreadHost, on_moved: Callable[[], None]) -> None:
        self._recording, self._host, self._on_moved = recording, host, on_moved
        self.first_step = first = recording.first_step
        self.models: list[WatchedModel] = []
        """All watched models. Replaced, never modified: other threads may be iterating over it."""
        self.position = Position()
        self.all: tuple[TrainingThread, ...] = (TrainingThread(recording, first, host),)
        self._here = _Here()
        # Acquired before the locks of `Steps`, never while one of them is held.
        self._lock = threading.RLock()
        self._complete = first
        recording.count = lambda: self.current.steps

    def models_of(self, training: TrainingThread) -> list[WatchedModel]:
        return [model for model in self.models if model.training is training]

    # ----------------------------------------------------------------------------------------------- the current thread

    @property
    def current(self) -> TrainingThread:
        """The training thread of the caller; for a thread that trains nothing, the one that is furthest ahead."""
        if len(self.all) == 1:
            return self.all[0]
        return self._own or self.furthest

    @property
    def furthest(self) -> TrainingThread:
        return max(self.all, key=lambda training: training.steps.last)

    @property
    def _own(self) -> TrainingThread | None:
        own = self._here.training
        return own if own is not None and own.thread is self._here.id and not own.is_abandoned else None

    @property
    def here(self) -> weakref.ref[Any]:
        return self._here.id

    def may_use(self, model: WatchedModel) -> bool:
        """Whether the activity of the calling thread may concern this model; not if it trains others. A model not run
        so far may belong to a thread that has yet to start, unless the calling thread watched it."""
        if len(self.all) == 1 and model.has_run:
            return True
        own = self._own
        if own is None or model.has_run:
            return own is None or own is model.training
        return model.watched_in is self._here.id

    def is_elsewhere(self, model: WatchedModel) -> bool:
        """Whether another thread that is still alive trains this model."""
        training = model.training
        return model.is_trained and training.is_alive and training.thread is not self._here.id

    # ---------------------------------------------------------------------------------------------- activity of threads

    def runs(self, model: WatchedModel) -> None:
        """The calling thread runs a forward pass of this model with gradients on."""
        here, training = self._here, model.training
        training.actor = here.id
        if here.training is not training or training.thread is not here.id or not model.has_run:
            with self._lock:
                self._assign(model, is_step=False, is_alone=True)
                model.has_run = True

    def trains(self, model: WatchedModel) -> None:
        """The calling thread steps an optimizer of this model."""
        here, training = self._here, model.training
        is_alone, training.actor = training.actor is here.id, here.id
        if here.training is not training or training.thread is not here.id or not model.is_trained:
            with self._lock:
                self._assign(model, is_step=True, is_alone=is_alone)
                model.has_run = model.is_trained = True

    def of_call(self, call: Call) -> list[TrainingThread]:
        """The training threads whose models this optimizer steps. Inside a backward pass the caller may be one of
        autograd's threads, which trains nothing."""
        from sonde.probe.guards import is_in_backward

        found = [model for model in self.models if model.optimizers in call.listeners]
        if not is_in_backward():
            for model in found:
                self.trains(model)
        return list(dict.fromkeys(model.training for model in found))

    def begins(self) -> TrainingThread:
        """The calling thread announces its next step. If it trains nothing yet while another thread does, and a model
        is still untrained, it is about to train that one."""
        if self._here.training is None and self.all[0].is_alive and self.all[0].thread is not self._here.id:
            with self._lock:
                if any(not model.is_trained for model in self.models):
                    self._take(self._new(self.first_step))
        return self.current

    # --------------------------------------------------------------------------------------------- assignment of models

    def _assign(self, model: WatchedModel, *, is_step: bool, is_alone: bool) -> None:
        """Decide which training thread the model belongs to. `is_alone`: no other thread used its models since the
        calling thread last did."""
        training, own = model.training, self._own
        others = [other for other in self.models_of(training) if other is not model]
        if training.thread is self._here.id and not training.is_abandoned:
            self._here.training = training
        elif not model.is_trained:
            self._assign_new(model, own, others)
        elif not training.is_alive:
            if own is None or is_step:
                self._take(training)
        elif is_step:
            if others and not is_alone:  # two threads train at once models that were counted together
                self._move(model, self._new(training.steps.number + training.steps.is_over))
            else:
                self._take(training)
        # Otherwise it is a forward pass of a model that another thread trains, as a teacher or to evaluate it.

    def _assign_new(self, model: WatchedModel, own: TrainingThread | None, others: list[WatchedModel]) -> None:
        """No optimizer has stepped it yet. It counts from the first step even if the thread that trained the others has
        ended: whether it has ended by now depends on timing."""
        training = model.training
        if own is not None:
            self._move(model, own)
        elif others and (training.is_alive or any(other.is_trained for other in others)):
            self._move(model, self._new(self.first_step))
        else:
            self._take(training)

    def _new(self, first: int) -> TrainingThread:
        made = TrainingThread(self._recording, first, self._host)
        made.seen_at = self.furthest.steps.number
        self.all = (*self.all, made)
        return made

    def _take(self, training: TrainingThread) -> None:
        training.thread = training.actor = self._here.id
        self._here.training = training

    def _move(self, model: WatchedModel, training: TrainingThread) -> None:
        before = model.training
        with before.steps.lock:  # otherwise it could pass on measurements made from now on
            passes = before.steps.leave(model, {id(one) for one in model.optimizers.watched})
            model.join(training)
        training.steps.join(passes)
        self._take(training)
        if not self.models_of(before) and len(self.all) > 1:
            before.steps.flush()
            before.is_abandoned = True
            self.all = tuple(other for other in self.all if other is not before)
        self._on_moved()

    # ------------------------------------------------------------------------------------------------------ the session

    def step_ended(self, ended: TrainingThread) -> None:
        """Tell the writer how far all threads are. After a kill, steps up to those of the furthest thread are shown,
        and a resumed run starts at the step of the slowest thread."""
        step, writer = ended.steps.number, self._recording.writer
        if len(self.all) == 1:
            self._complete = step
            writer.set_step(step)
            return
        numbers = [training.steps.number for training in self.all]
        ended.seen_at = furthest = max(numbers)
        recent = [t for t in self.all if t.is_alive and furthest - t.seen_at <= _IDLE_STEPS]
        active = [training.steps.number for training in recent if self.models_of(training)]
        self._complete = max(self._complete, min(active, default=step))
        writer.set_step(self._complete, visible=furthest)

    @property
    def are_several(self) -> bool:
        """Whether more than one thread has models to train."""
        return len(self.all) > 1 and sum(bool(self.models_of(training)) for training in self.all) > 1

    def restart(self, step: int) -> None:
        """Continue with this step; only if a single thread trains."""
        self.first_step = self._complete = step
        for training in self.all:
            training.governing.restart(step)
            training.steps.restart(step)

    def facts(self) -> dict[str, Any]:
        """The cost of recording."""
        return facts_of(self._recording.ledger, [training.governing for training in self.all])
