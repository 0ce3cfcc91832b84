"""Statistics of a run's data: the model's inputs and outputs, the loss, the batch. Logged as `data/<site>/<stat>`.

A session has one inspection, fed by the first watched model, by loss functions and by `sonde.batch`. It keeps no user
tensor longer than a step, and only token sequences at all.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from sonde.probe.guards import is_observable, protected, quiet
from sonde.probe.loss.inputs import INPUT_NAMES, all_tensors, main_input, main_of, main_output
from sonde.probe.loss.modules import LossCall, LossTap
from sonde.probe.outputs import is_plain_tensor
from sonde.probe.schedule import NEVER
from sonde.reduce.inspect.baseline import Balance, Baseline
from sonde.reduce.inspect.data import Values, inspect_input, inspect_target, is_integer
from sonde.reduce.inspect.identity import batch_hash, label_purity
from sonde.reduce.inspect.loss_call import inspect_loss
from sonde.reduce.inspect.output import inspect_output
from sonde.reduce.inspect.tokens import alignment, shift
from sonde.session.data.loss import SeenLoss
from sonde.session.data.validation import SeenValidation
from sonde.session.process.threads import TrainingThreads
from sonde.session.recording import Recording
from sonde.session.scalars import log_values

if TYPE_CHECKING:
    from sonde.probe.optimizer.tap import OptimizerStep
    from sonde.session.model.watched import WatchedModel
    from sonde.session.training.thread import TrainingThread

MAX_PURITIES: Final = 128
MAX_LABELS: Final = 1024
"""Labels of more samples than these, or of every token of a text, are only read when a step is inspected."""


class DataInspection:
    """Collects the numbers of a step and logs them when the step ends."""

    def __init__(self, recording: Recording, threads: TrainingThreads) -> None:
        self._recording, self._threads = recording, threads
        self.own_s = 0.0
        self.loss_name: str | None = None
        self.baseline = Baseline()
        self._baseline_before = copy.copy(self.baseline)
        """The state that the previous step left behind."""
        self._values: dict[str, Values] = {}
        self._tokens: Tensor | None = None
        self._labels: tuple[Tensor, int] | None = None
        self._given_targets: Tensor | None = None
        self._root_output: int | None = None
        self._is_loss_of_root = False
        self._has_root = self._has_loss = False
        """Whether an earlier step saw them; if so, no substitute is needed until they appear again."""
        self._hashed_step = -1
        self._is_purity_known = False
        self._num_purities = 0
        failed = recording.breaker
        self.tap = LossTap(self, failed)
        self.training = SeenLoss(recording, threads, is_here=lambda: self.is_here, on_trained=self._trained)
        self.validation = SeenValidation(recording, self.training, lambda: self.is_here)
        self.model_begins = protected(self._model_begins, failed, "evaluation")
        self.model_evaluated = protected(self._model_evaluated, failed, "evaluation")
        self.number_returned = protected(self._number_returned, failed, "evaluation")
        self.model_returned = protected(self._model_returned, failed, "data inspection")
        self._output: int | None = None
        """The storage address of the model's newest output."""

    def detach(self) -> None:
        self.tap.detach()
        self.training.detach()
        self.validation.detach()
        self._forget()

    def rest(self, *, is_on: bool) -> None:
        """Follow no losses, or follow them again."""
        for tap in (self.tap, self.training.tap):
            if is_on:
                tap.pause()
            else:
                tap.resume()

    def trained_again(self) -> None:
        """An evaluation is over: the model is trained again."""
        self.validation.model_begins(is_evaluating=False, is_train_mode=True)
        self._trained()

    # -------------------------------------------------------------------------------------------------------- selection

    @property
    def watching(self) -> WatchedModel | None:
        """Follow the first watched model: a run has one kind of data."""
        return next(iter(self._threads.models), None)

    @property
    def is_inspecting(self) -> bool:
        watching = self.watching
        return watching is not None and watching.wants_inspection and watching.inspection.is_first_part

    @property
    def kind(self) -> str:
        """The part of the budget that this step belongs to; empty if it records nothing."""
        watching = self.watching
        if self.is_inspecting or watching is None:
            return "inspect" if self.is_inspecting else ""
        return "scalars" if watching.wants_scalars else ""

    @property
    def wants_loss(self) -> bool:
        watching = self.watching
        return watching is not None and watching.is_allowed and self._is_asked(watching) and self.is_here

    @property
    def thread(self) -> TrainingThread | None:
        """The thread that trains that model. Other threads use other data."""
        watching = self.watching
        return None if watching is None else watching.training

    @property
    def is_here(self) -> bool:
        """Whether the current activity of the calling thread may concern that model."""
        watching = self.watching
        return watching is not None and self._threads.may_use(watching)

    def _is_asked(self, watching: WatchedModel) -> bool:
        """Whether this is the followed model, called by the user."""
        return watching is self.watching and watching.plan.inspect is not NEVER and not watching.forward.is_instead

    @property
    def _step_number(self) -> int:
        return self._recording.step_number if self.thread is None else self.thread.steps.number

    @property
    def _is_step_over(self) -> bool:
        return self._recording.is_step_over if self.thread is None else self.thread.steps.is_over

    def restart(self, watching: WatchedModel) -> None:
        """Discard observations since the start of the step: they may come from a pass that does not belong to it."""
        if watching is self.watching:
            self._forget()
            self._hashed_step, self.baseline = -1, copy.copy(self._baseline_before)

    # ----------------------------------------------------------------------------------------------------- observations

    def _model_begins(self, watching: WatchedModel) -> None:
        model = watching.names.model() if self._is_asked(watching) else None
        if model is not None and is_observable(in_inference=True):
            self.validation.model_begins(
                is_evaluating=not (model.training and torch.is_grad_enabled()), is_train_mode=model.training
            )

    def _model_evaluated(self, watching: WatchedModel, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if self._is_asked(watching) and is_observable(in_inference=True):
            with quiet():
                self._root_gave(args, kwargs, output)

    def _trained(self) -> None:
        self.validation.trained()

    def _root_gave(self, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        self.validation.model_gave(args, kwargs, output)
        if self.validation.is_evaluating:
            found = main_output(output)
            self._output = None if found is None else _address(found)

    def _number_returned(self, watching: WatchedModel, module: nn.Module, args: Any, value: Tensor) -> None:
        if self._is_asked(watching) and self.is_here:
            self.validation.module_gave(module, args, value)

    def _model_returned(self, watching: WatchedModel, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if not self._is_asked(watching):
            return
        start = time.perf_counter()
        with quiet():
            self.training.micro_batches.model_called(main_input(args, kwargs))
            self._root_gave(args, kwargs, output)
            if watching.wants_scalars and self._hashed_step != watching.training.steps.number:
                self._identify(all_tensors(args, kwargs))
            if self.is_inspecting and "root" not in self._values:
                self._inspect_root(main_input(args, kwargs), main_output(output))
                self._take_labels(main_input(args, kwargs), kwargs.get("labels"))
        self.own_s += time.perf_counter() - start

    def _inspect_root(self, x: Tensor | None, output: Tensor | None) -> None:
        self._values["root"] = {}  # once per step: the first micro-batch only
        if x is not None:
            self._values["input"] = inspect_input(x.detach())
            self._pair(x.detach())
        if output is None:
            return
        self._root_output = _address(output)
        if "loss" not in self._values and not self._has_loss:
            self._values["output"] = inspect_output(output.detach(), self._given_targets)

    def _take_labels(self, x: Tensor | None, labels: Any) -> None:
        """Labels of a model that computes its loss inside, by other means than torch's loss functions."""
        if isinstance(labels, Tensor) and is_plain_tensor(labels) and "loss" not in self._values and not self._has_loss:
            self._values.setdefault("target", _targets_given(x, labels.detach()))

    def loss_called(self, call: LossCall) -> None:
        start = time.perf_counter()
        is_trained = torch.is_grad_enabled() and is_observable()
        with quiet():
            is_of_output = self._output is not None and _address(call.input) == self._output
            self.validation.function_called(call, is_of_output=is_of_output)
        # A loss computed after the optimizer's step belongs to no step.
        if is_trained and not self._is_step_over:
            if self.is_inspecting:
                self._loss_trained(call)
            else:
                with quiet():
                    self._measure_purity(call.target)
        self.own_s += time.perf_counter() - start

    def _wants_purity(self, target: Tensor) -> bool:
        """The order of the data shows in consecutive steps, also where most of them are not inspected."""
        watching = self.watching
        is_due = watching is not None and watching.wants_scalars and self._num_purities < MAX_PURITIES
        is_class = is_integer(target) and target.ndim == 1 and target.numel() <= MAX_LABELS
        return is_due and is_class and not self._is_purity_known and "label_purity" not in self._values.get("batch", {})

    def _measure_purity(self, target: Tensor) -> None:
        if not self._wants_purity(target):
            return
        self._num_purities += 1
        found = label_purity(target.detach())
        if found is not None:
            self._values["batch"] = {**self._values.get("batch", {}), "label_purity": found}

    def _loss_trained(self, call: LossCall) -> None:
        is_of_root = self._root_output is not None and _address(call.input) == self._root_output
        # Of several losses, use the one computed from the model's own output, or else the first.
        if "loss" not in self._values or (is_of_root and not self._is_loss_of_root):
            self._is_loss_of_root = is_of_root
            self._name_loss(call.name)
            with quiet():
                self._inspect_loss(call)

    def _inspect_loss(self, call: LossCall) -> None:
        output, target = call.input.detach(), call.target.detach()
        self._values |= inspect_loss(
            call.name,
            output,
            target,
            call.result.detach(),
            call.reduction,
            call.ignore_index,
            self.baseline,
            Balance(call.weight, call.pos_weight, call.label_smoothing),
        )
        self._set_purity()
        if is_integer(target):
            self._labels = target, call.ignore_index
            self._pair(self._tokens)

    def given(self, inputs: Any, targets: Any, *, is_purity_known: bool) -> None:
        """Record the arguments of `sonde.batch`, for models and losses that sonde does not see itself."""
        self._hashed_step, self._is_purity_known = self._step_number, is_purity_known
        if not self.is_inspecting:
            return
        start = time.perf_counter()
        with quiet():
            x, y = main_of(inputs, INPUT_NAMES), main_of(targets, ())
            if x is not None and not self._has_root:
                self._values.setdefault("input", inspect_input(x.detach()))
            if y is not None and not self._has_loss:
                self._given_targets = y.detach()
                self._values.setdefault("target", _targets_given(x, y.detach()))
                self._set_purity()
        self.own_s += time.perf_counter() - start

    def _pair(self, x: Tensor | None) -> None:
        """Pair tokens and labels, which arrive in either order: models that compute their loss inside report last."""
        if x is None or not is_integer(x):
            return
        self._tokens = x
        if self._labels is not None and "target" in self._values:
            self._values["target"] = {**self._values["target"], **alignment(x, *self._labels)}

    def _set_purity(self) -> None:
        target = self._values.get("target", {})
        if target.get("is_class") == 1.0 and not self._is_purity_known:
            self._values["batch"] = {**self._values.get("batch", {}), "label_purity": target["top_share"]}

    def _identify(self, tensors: list[Tensor]) -> None:
        """Record one number for the batch of this step, unless `sonde.batch` has provided it."""
        self._hashed_step = self._step_number
        found = batch_hash(tensors)
        if found is not None:
            self._values["batch"] = {**self._values.get("batch", {}), "hash": found}

    # -------------------------------------------------------------------------------------------------- end of the step

    def emit(self, step: int) -> None:
        """Log everything observed in this step."""
        num_micro, num_cleared = self.training.micro_batches.take()
        if num_micro > 1 and self.watching is not None and self.watching.wants_scalars:
            counts: Values = {"micro_batches": float(num_micro), "cleared": float(num_cleared)}
            self._values["batch"] = {**self._values.get("batch", {}), **counts}
        if self._values and self.is_inspecting and self.validation.source is not None:
            size = float(self.validation.source.kind[1])
            self._values["batch"] = {**self._values.get("batch", {}), "source_size": size}
        if self._values:
            self._has_root = self._has_root or "root" in self._values
            self._has_loss = self._has_loss or "loss" in self._values
            known = dict(self._values)
            found = {f"data/{site}/{stat}": value for site, values in known.items() for stat, value in values.items()}
            if found:
                log_values(self._recording, self._threads.current, found, step)
        self.training.emit(step)
        self.validation.emit(step)
        self._forget()
        self._baseline_before = copy.copy(self.baseline)

    def before_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        if watching.training is self.thread:
            self.training.before_update(watching, step)

    def after_update(self, watching: WatchedModel, step: OptimizerStep) -> None:
        if watching.training is self.thread:
            self.training.after_update(watching, step)

    def take_own_s(self) -> float:
        """Time spent on observations on the training thread since the last call of this method."""
        own_s, self.own_s = self.own_s, 0.0
        return own_s

    def _name_loss(self, name: str) -> None:
        if name != self.loss_name:
            self.loss_name = name
            self._recording.writer.note(loss=name)
            for watching in self._threads.models:
                if watching.training is self.thread:
                    watching.loss_name = name

    def _forget(self) -> None:
        self._values = {}
        self._tokens = self._labels = self._given_targets = self._root_output = None
        self._is_loss_of_root = self._is_purity_known = False


def _address(tensor: Tensor) -> int | None:
    """The address of the first element: a view of the model's output counts as the model's output."""
    return tensor.data_ptr() if tensor.layout is torch.strided else None


def _targets_given(x: Tensor | None, y: Tensor) -> Values:
    values = dict(inspect_target(y))
    found = shift(x, y, is_raw=True) if x is not None else None
    if found is None or x is None:
        return values
    padding = alignment(x, y).get("padding")
    return {**values, "shift": found} | ({} if padding is None else {"padding": padding})
