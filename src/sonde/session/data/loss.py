"""The training loss of programs that log none, taken from calls of `backward()`. Logged as `data/loss/train`.

With several micro-batches it is their mean, each with its weight in training. Nothing blocks: the numbers are combined
on the writer thread.
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
from sonde.session.data.micro_batches import MicroBatches
from sonde.session.process.threads import TrainingThreads
from sonde.session.recording import Recording

if TYPE_CHECKING:
    from sonde.probe.optimizer.tap import OptimizerStep
    from sonde.session.model.watched import WatchedModel

MAX_MICRO_BATCHES: Final = 4096
"""Limit for a step that may never end: the losses of its first micro-batches are enough."""


class SeenLoss:
    """Collects the tensors that backward passes start from, and logs the loss when a step is emitted."""

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
        self.has_trained = False
        """Whether a backward pass was seen."""
        self.origin: Any = None
        """The call that produced the loss of the newest micro-batch; None if several calls contributed to it."""
        self._micro: list[list[Root]] = []
        """Losses since the last optimizer step. Backward passes over one graph belong to one micro-batch."""
        self._trained: list[list[Root]] = []
        """The losses that the first watched model was updated with."""
        self._others: list[list[Root]] = []
        """The losses that another model was updated with, in a step without the first one."""
        self._is_graph_kept = False
        self._closure_from: int | None = None
        """While an optimizer computes its gradients itself: the number of earlier micro-batches."""
        self._scale: Tensor | None = None
        self.micro_batches = MicroBatches(self._num_optimizer_calls)
        self.tap = BackwardTap(self._begins, self._backward, recording.breaker)

    def detach(self) -> None:
        self.tap.detach()
        self._micro, self._trained, self._others, self._scale = [], [], [], None

    @property
    def _watching(self) -> WatchedModel | None:
        return next(iter(self._threads.models), None)

    def _begins(self) -> bool:
        """Note that something is trained; returns whether its loss should be recorded."""
        if not self._is_here():
            return False
        self.has_trained = True
        self._on_trained()
        self.micro_batches.backward_begins()
        watching = self._watching
        if watching is None or watching.plan.inspect is NEVER:
            return False
        return watching.wants_scalars or watching.is_recording

    def _backward(self, roots: list[Root], is_graph_kept: bool) -> None:
        is_part, self._is_graph_kept = self._is_graph_kept and bool(self._micro), is_graph_kept
        self.origin = roots[0].origin if len(roots) == 1 and not is_part else None
        if is_part:
            self._micro[-1].extend(roots)
        # An optimizer that evaluates several points in one step started at the first.
        elif self._closure_from in (None, len(self._micro)) and len(self._micro) < MAX_MICRO_BATCHES:
            self._micro.append(roots)

    def _num_optimizer_calls(self) -> int:
        hooks = None if self._watching is None else self._watching.optimizers.hooks
        return 0 if hooks is None else hooks.num_calls

    def before_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """Called when an optimizer is about to step, or to compute its gradients and step."""
        if watching is self._watching:
            self.micro_batches.update_begins(named.ref for named in watching.names.parameters.values())
        if step.has_closure:
            self._closure_from = len(self._micro)
        else:
            self._take(watching, step)

    def after_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        if step.has_closure:
            self._closure_from = None
            self._take(watching, step)

    def _take(self, watching: WatchedModel, step: OptimizerStep) -> None:
        """With several models, as in a GAN, losses before the step of the first model belong to that model."""
        micro, self._micro, self._is_graph_kept = self._micro, [], False
        if watching is not self._watching:
            self._others = micro or self._others
            return
        self._trained += micro
        if step.loss_scale is not None:
            with quiet():
                self._scale = step.loss_scale.detach().clone()  # the scaler changes its own tensor in place

    def emit(self, step: int) -> None:
        """Log the loss of this step. Losses that no optimizer has used yet belong to the next step."""
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
    """Tensors that are copied to the host together."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def place(self, tensor: Tensor) -> int:
        """The position that its number will have."""
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def later(self, number: float | Tensor) -> tuple[float, int | None]:
        """A number that is already known, or the position it will have."""
        return (0.0, self.place(number)) if isinstance(number, Tensor) else (number, None)


class _Part:
    """A micro-batch whose numbers are being copied."""

    def __init__(self, roots: list[Root], numbers: _Numbers) -> None:
        self._values = [numbers.place(root.value) for root in roots]
        factors = roots[0].factors if len(roots) == 1 else ()
        self._factors = [numbers.later(factor) for factor in factors]
        terms = getattr(roots[0].origin, "num_terms", None) if len(roots) == 1 else None
        self._terms = numbers.later(np.nan if terms is None else terms)

    def resolve(self, numbers: list[float]) -> MicroBatch:
        *factors, terms = (known if at is None else numbers[at] for known, at in (*self._factors, self._terms))
        return MicroBatch(sum(numbers[at] for at in self._values), tuple(factors), terms)
