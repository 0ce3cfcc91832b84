"""The validation loss of programs that log none: the training loss function, called while nothing is trained.

Logged as `data/loss/validation`: the mean over the first data set evaluated after a step that is not the training set.
Every term of the loss has the same weight, including those of a smaller last batch.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn

from sonde.probe.guards import is_observable, quiet
from sonde.probe.loss.backward import mark
from sonde.probe.loss.batches import BatchTap, DataSource
from sonde.probe.loss.inputs import main_input
from sonde.probe.loss.modules import LossCall
from sonde.probe.outputs import is_plain_tensor, items_of
from sonde.reduce.inspect.evaluated import Evaluated, num_terms
from sonde.reduce.scalars import PendingScalars
from sonde.schema.losses import SEEN_VALIDATION
from sonde.schema.records import ScalarsRecord
from sonde.session.recording import Recording

if TYPE_CHECKING:
    from sonde.session.data.loss import SeenLoss

_MAX: Final = 8
"""Limit of call types in one evaluation and of known training sets; further ones are not kept."""
TRAIN_MODE: Final = "data/loss/validation_train_mode"
"""Fraction of the evaluated batches for which the model was in train mode."""
_REDUCTIONS: Final = ("mean", "batchmean", "sum")
Key = tuple[Literal["function", "output", "module"], Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """A call that returns a loss: of a loss function, of the model itself, or of a module that takes its output."""

    key: Key
    num_terms: Tensor | float | None = None
    """The number of terms, for a function that sums them."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call since the model was last called: it counts, unless `backward()` shows that it was for training."""

    value: Tensor
    weight: Tensor | float
    is_sum: bool = False
    is_of_output: bool = True


class SeenValidation:
    """Follows evaluations of the first watched model."""

    def __init__(self, recording: Recording, training: SeenLoss, is_here: Callable[[], bool]) -> None:
        self._recording, self.training = recording, training
        self.is_evaluating = False
        """Whether the last call of the model was an evaluation."""
        self._calls: dict[Key, _Call] = {}
        self._sums: dict[Key, Evaluated] = {}
        self._is_train_mode = self._was_train_mode = False
        """Whether the model was in train mode in its last call, and in the last call that returned a loss."""
        self._num_counted = self._num_in_train_mode = 0
        self._criteria: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.batches = BatchTap(recording.breaker, is_here)
        self.source: DataSource | None = None
        """The data set that the batches of this evaluation, or of this training, come from."""
        self._trained_on: dict[tuple[int, int], DataSource] = {}
        self._validated_on: DataSource | None = None
        self._is_chosen = False
        """Whether a data set was chosen since the last training step."""

    def detach(self) -> None:
        self.batches.detach()
        self._calls, self._sums = {}, {}

    # ----------------------------------------------------------------------------------------------------- observations

    def model_begins(self, *, is_evaluating: bool, is_train_mode: bool) -> None:
        """Called before the model runs: a loss computed since its last call, and not trained on, was an evaluation."""
        self._count()
        self._is_train_mode = is_train_mode
        if is_evaluating != self.is_evaluating:
            self.is_evaluating, self.source = is_evaluating, None
        self.source = self.batches.take() or self.source

    def trained(self) -> None:
        """`backward()` was called."""
        self._calls, self._is_chosen = {}, False
        self._trained_on = {key: known for key, known in self._trained_on.items() if not known.is_gone}
        if self.source is not None and len(self._trained_on) < _MAX:
            self._trained_on[self.source.key] = self.source

    def function_called(self, call: LossCall, *, is_of_output: bool) -> None:
        """Called when a torch loss function returns. This and the following methods run with modes and gradients
        off."""
        if call.result.numel() != 1 or call.reduction not in _REDUCTIONS:
            return
        key: Key = ("function", call.name)
        is_sum, has_graph = call.reduction == "sum", call.result.grad_fn is not None
        known = self._calls.get(key)
        is_counted = self.is_evaluating and (known is None or (is_of_output and not known.is_of_output))
        if has_graph and not is_sum:
            mark(call.result, Origin(key))
        if is_counted or (has_graph and is_sum):
            with torch.inference_mode(False):
                terms = num_terms(call.name, call.target.detach(), call.reduction, call.ignore_index)
                if has_graph and is_sum:
                    mark(call.result, Origin(key, terms))
                if is_counted:
                    self._hold(key, call.result, terms, is_sum=is_sum, is_of_output=is_of_output)

    def model_gave(self, args: Any, kwargs: Any, output: Any) -> None:
        """Called when the model returns; a single number in its output may be its loss."""
        for name, value in _numbers(output):
            self._gave(("output", name), value, main_input(args, kwargs))

    def module_gave(self, module: nn.Module, args: Any, value: Tensor) -> None:
        """Called when a module outside the model, such as a criterion, returns a number."""
        if is_observable(in_inference=True) and is_plain_tensor(value) and value.is_floating_point():
            number = self._criteria.setdefault(module, len(self._criteria))
            self._gave(("module", number), value, main_input(args, {}))

    def _gave(self, key: Key, value: Tensor, x: Tensor | None) -> None:
        if value.grad_fn is not None:
            mark(value, Origin(key))
        if self.is_evaluating:
            with torch.inference_mode(False):
                self._hold(key, value, float(len(x)) if x is not None and x.ndim else 1.0)

    def _hold(self, key: Key, value: Tensor, weight: Tensor | float, **about: bool) -> None:
        if key in self._calls or len(self._calls) < _MAX:
            self._was_train_mode = self._is_train_mode
            # A copy: the user may divide the original in place afterwards.
            self._calls[key] = _Call(value.detach().clone(), weight, **about)

    # --------------------------------------------------------------------------------------------------------- counting

    def _count(self) -> None:
        calls, self._calls = self._calls, {}
        if not calls or not self._is_validation():
            return
        self._num_in_train_mode += self._was_train_mode
        self._num_counted += 1
        with quiet(), torch.inference_mode(False):
            for key, call in calls.items():
                if key in self._sums or len(self._sums) < _MAX:
                    known = self._sums.setdefault(key, Evaluated(is_sum=call.is_sum))
                    known.add(call.value, call.weight)

    def _is_validation(self) -> bool:
        """Whether the batch belongs to the validation set: the first set after each step that is not trained on.

        A data set that was re-created for this evaluation is recognised by its type and length.
        """
        source, known = self.source, self._validated_on
        if source is not None and source.key in self._trained_on:
            return False
        if known is not None and known.key in self._trained_on:
            known = None
        if source is not None and known is not None and source.key != known.key:
            is_made_again = known.is_gone and known.kind == source.kind
            if self._is_chosen or not is_made_again:
                return False
        self._validated_on, self._is_chosen = source or known, True
        return True

    # ---------------------------------------------------------------------------------------------------------- logging

    def emit(self, step: int) -> None:
        self._count()
        sums, self._sums = self._sums, {}
        num, in_train_mode = self._num_counted, self._num_in_train_mode
        self._num_counted = self._num_in_train_mode = 0
        origin, source = self.training.origin, self._validated_on
        is_trained_on = source is not None and source.key in self._trained_on  # as far as it is known now
        if isinstance(origin, Origin) and origin.key in sums and not is_trained_on:
            self._put(sums[origin.key], step)
            self._put_mode(in_train_mode / max(num, 1), step)

    def _put_mode(self, share: float, step: int) -> None:
        ids = np.array([self._recording.writer.scalar_id(TRAIN_MODE)], np.int32)
        record = ScalarsRecord(ids, np.array([step]), np.array([time.time()]), np.array([share]))
        self._recording.writer.put(lambda: record, 64, step=step, stream="scalars")

    def _put(self, found: Evaluated, step: int) -> None:
        pending = PendingScalars([found.total, found.weight], are_ours=True)
        ids = np.array([self._recording.writer.scalar_id(SEEN_VALIDATION)], np.int32)
        steps, times, known = np.array([step]), np.array([time.time()]), self.training.step_loss

        def resolve() -> ScalarsRecord | None:
            total, weight = pending.resolve()
            loss = found.mean(total, weight, known)
            return None if math.isnan(known.factor) else ScalarsRecord(ids, steps, times, np.array([loss]))

        self._recording.writer.put(resolve, 64, step=step, stream="scalars")


def _numbers(output: Any) -> list[tuple[str, Tensor]]:
    """The single numbers that a model returns, by their position in the output."""
    pairs = [("", output)] if isinstance(output, Tensor) else [(str(key), item) for key, item in items_of(output)]
    return [
        (key, item) for key, item in pairs if is_plain_tensor(item) and item.dim() == 0 and item.is_floating_point()
    ]
