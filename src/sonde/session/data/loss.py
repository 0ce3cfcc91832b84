"""The training loss of programs that log none: what `backward()` was called on. Logged as `data/loss/train`.

Of a step made of several micro-batches it is their mean, each with its weight in training. Nothing is waited for: the
numbers are put together on the writer's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor

from sonde.probe.guards import quiet
from sonde.probe.loss.backward import BackwardTap, Root
from sonde.probe.schedule import NEVER
from sonde.reduce.inspect.step_loss import MicroBatch, StepLoss
from sonde.reduce.scalars import PendingScalars
from sonde.schema.losses import SEEN_TRAINING
from sonde.schema.records import ScalarsRecord
from sonde.session.recording import Recording
from sonde.session.threads import TrainingThreads

if TYPE_CHECKING:
    from sonde.probe.optimizer.tap import OptimizerStep
    from sonde.session.model.watched import WatchedModel

MAX_MICRO_BATCHES: Final = 4096
"""Of a step that may never end: the loss of the first ones will do."""


class SeenLoss:
    """Collects what backward passes begin with, and logs the loss of a step when it is emitted."""

    def __init__(
        self,
        recording: Recording,
        threads: TrainingThreads,
        *,
        is_here: Callable[[], bool],
        on_trained: Callable[[], None],
    ) -> None:
        self._recording, self._threads = recording, threads
        self._is_here, self._on_trained = is_here, on_trained
        self.step_loss = StepLoss()
        self.origin: Any = None
        """The call that gave the loss of the newest micro-batch; None where it was made of more than one."""
        self._micro: list[list[Root]] = []
        """Since the last step of an optimizer. Backward passes over one graph are parts of one micro-batch."""
        self._trained: list[list[Root]] = []
        """What the first model watched was stepped by."""
        self._others: list[list[Root]] = []
        """What another model was stepped by, in a step without the first."""
        self._is_graph_kept = False
        self._closure_from: int | None = None
        """While an optimizer makes its gradients itself: how many micro-batches there were before."""
        self._scale: Tensor | None = None
        self.tap = BackwardTap(self._begins, self._backward, recording.breaker)

    def detach(self) -> None:
        self.tap.detach()
        self._micro, self._trained, self._others, self._scale = [], [], [], None

    @property
    def _watching(self) -> WatchedModel | None:
        return next(iter(self._threads.models), None)

    def _begins(self) -> bool:
        """Something is trained; whether its loss is to be recorded."""
        if not self._is_here():
            return False
        self._on_trained()
        watching = self._watching
        return watching is not None and watching.is_recording and watching.plan.inspect is not NEVER

    def _backward(self, roots: list[Root], is_graph_kept: bool) -> None:
        is_part, self._is_graph_kept = self._is_graph_kept and bool(self._micro), is_graph_kept
        self.origin = roots[0].origin if len(roots) == 1 and not is_part else None
        if is_part:
            self._micro[-1].extend(roots)
        # An optimizer that tries several points in one step began at the first.
        elif self._closure_from in (None, len(self._micro)) and len(self._micro) < MAX_MICRO_BATCHES:
            self._micro.append(roots)

    def before_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """An optimizer is about to step, or to make its gradients and step."""
        if step.has_closure:
            self._closure_from = len(self._micro)
        else:
            self._take(watching, step)

    def after_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        if step.has_closure:
            self._closure_from = None
            self._take(watching, step)

    def _take(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """Of several models, as of a GAN, the losses before the step of the first are its own."""
        micro, self._micro, self._is_graph_kept = self._micro, [], False
        if watching is not self._watching:
            self._others = micro or self._others
            return
        self._trained += micro
        if step.loss_scale is not None:
            with quiet():
                self._scale = step.loss_scale.detach().clone()  # the scaler changes its own in place

    def emit(self, step: int) -> None:
        """Log the loss of this step. What no optimizer has stepped by yet belongs to the next one."""
        micro = self._trained or self._others
        first = self._watching
        together = [] if first is None else self._threads.models_of(first.training)
        if not micro and not any(watching.optimizers.num_watched for watching in together):
            micro, self._micro = self._micro, []
        if micro:
            self._put(micro, self._scale, step)
        self._trained, self._others, self._scale = [], [], None

    def _put(self, micro: list[list[Root]], scale: Tensor | None, step: int) -> None:
        numbers = _Numbers()
        parts = [_Part(roots, numbers) for roots in micro]
        at_scale = None if scale is None else numbers.place(scale)
        pending = PendingScalars(numbers.tensors, are_ours=True)
        ids = np.array([self._recording.writer.scalar_id(SEEN_TRAINING)], np.int32)
        steps, times, known = np.array([step]), np.array([time.time()]), self.step_loss

        def resolve() -> ScalarsRecord:
            found = pending.resolve()
            scaled_by = None if at_scale is None else found[at_scale]
            loss = known.of_step([part.resolve(found) for part in parts], scaled_by)
            return ScalarsRecord(ids, steps, times, np.array([loss]))

        self._recording.writer.put(resolve, 64, step=step, stream="scalars")


class _Numbers:
    """Tensors that go to the host together."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def place(self, tensor: Tensor) -> int:
        """Where its number will be."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def later(self, number: float | Tensor) -> tuple[float, int | None]:
        """A number that is known, or the place where it will be."""
        return (0.0, self.place(number)) if isinstance(number, Tensor) else (number, None)


class _Part:
    """A micro-batch whose numbers are on their way."""

    def __init__(self, roots: list[Root], numbers: _Numbers) -> None:
        self._values = [numbers.place(root.value) for root in roots]
        factors = roots[0].factors if len(roots) == 1 else ()
        self._factors = [numbers.later(factor) for factor in factors]
        terms = getattr(roots[0].origin, "num_terms", None) if len(roots) == 1 else None
        self._terms = numbers.later(np.nan if terms is None else terms)

    def resolve(self, numbers: list[float]) -> MicroBatch:
        *factors, terms = (known if at is None else numbers[at] for known, at in (*self._factors, self._terms))
        return MicroBatch(sum(numbers[at] for at in self._values), tuple(factors), terms)
