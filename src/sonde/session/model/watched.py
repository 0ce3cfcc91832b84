"""One watched model: its taps, the plan for each step, and the resulting sketches.

Its host decides when each of its methods is called in a step: see `session/training_step.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from sonde.probe.compiled import has_compiled_parts, num_compiled_frames
from sonde.probe.entry import EntryTap
from sonde.probe.forward import ForwardTap
from sonde.probe.guards import quiet
from sonde.probe.loss.backward import BackwardTap, Root
from sonde.probe.model import ModelNames, ModuleRef, NamedParameter
from sonde.probe.optimizer.clip import ClipTap
from sonde.probe.optimizer.hooks import OptimizerHooks
from sonde.probe.optimizer.tap import OptimizerStep, OptimizerTap
from sonde.probe.schedule import ALWAYS, NEVER, Schedule
from sonde.probe.select import chooser, is_chosen
from sonde.probe.sharded import has_shards, is_readable, is_sharded, local_of, placed
from sonde.reduce.optimizer_pass import OptimizerPass
from sonde.reduce.torch import Reducer, Table, scale_rows, set_raw
from sonde.schema.names import Kind
from sonde.session.inspect.inspection import Inspection
from sonde.session.model.addends import AddendCollector
from sonde.session.model.optimizer_names import OptimizerNames
from sonde.session.model.optimizer_scalars import OptimizerScalars
from sonde.session.model.parameter_subset import ParameterSubset, adam_moments, is_state, split_by_grad
from sonde.session.model.predicted_update import UpdatePrediction
from sonde.session.model.site_ids import SiteIds
from sonde.session.model.unseen_steps import UnseenUpdates
from sonde.session.observers.nonfinite import Looks, NonFiniteWatch
from sonde.session.plan import Plan
from sonde.session.ranks.same_weights import is_due, model_fingerprint, part_fingerprints, part_keys
from sonde.session.recording import Recording
from sonde.session.scalars import log_values
from sonde.session.training.budget import OF_KIND
from sonde.session.training.thread import TrainingThread
from sonde.write.ranks import world_size

if TYPE_CHECKING:
    from sonde.probe.in_graph import InGraphTaps

MAX_ONES: Final = 1 << 16
"""Maximum number of activations in one step. Records are held until the step is over, which may never happen."""
MAX_SAMPLED: Final = 1 << 14
"""Maximum number with histograms: a sample takes as much memory as twenty sketches."""


class Measured(NamedTuple):
    """Measurements from some of the forward passes."""

    tables: list[Table]
    looks: Looks | None
    num_ones: int


class ModelHost(Protocol):
    """Receives what the taps of a model see, and decides what to do in which order."""

    hooks: OptimizerHooks | None
    optimizer_names: OptimizerNames

    @property
    def is_keeping_tensors(self) -> bool:
        """Whether a snapshot of the step is being taken."""

    def is_fresh(self) -> bool:
        """Whether no step was made since the process started, or since it returned to an earlier step."""

    def optimizer_taps(self) -> Iterable[OptimizerTap]:
        """The taps of all models, in the order in which they were watched."""

    def is_resting(self, model: WatchedModel) -> bool:
        """Whether nothing is recorded, and this call of the model needs nothing more."""

    def model_begins(self, model: WatchedModel) -> None:
        """Called before the model runs, for training or not."""

    def model_entered(self, model: WatchedModel) -> None:
        """Called when a training forward pass starts."""

    def forward_seen(self, model: WatchedModel, place: ModuleRef, output: Any) -> None:
        """Called when a module has returned, in training."""

    def module_returned(self, model: WatchedModel, place: ModuleRef, output: Any) -> None:
        """Called after that output was measured; only while tensors are kept."""

    def model_returned(self, model: WatchedModel, args: Any, kwargs: Any, output: Any) -> None:
        """Called when the forward pass has ended."""

    def model_evaluated(self, model: WatchedModel, args: Any, kwargs: Any, output: Any) -> None:
        """Called when the model has returned from a pass that does not train."""

    def number_returned(self, model: WatchedModel, module: nn.Module, args: Any, value: Tensor) -> None:
        """Called when another module, such as a criterion, has returned a single number."""

    def pass_restarted(self, model: WatchedModel) -> None:
        """The pass before may not belong to the step: what is measured once per step is measured again."""

    def optimizer_step(self, model: WatchedModel, step: OptimizerStep) -> Iterator[None]:
        """A generator that is advanced before and after the optimizer steps."""


class WatchedModel:
    """Records one model until `detach`. Holds no reference that would keep the model or its tensors alive."""

    def __init__(
        self,
        recording: Recording,
        host: ModelHost,
        model: nn.Module,
        optimizers: list[Optimizer] | None,
        plan: Plan,
        *,
        training: TrainingThread,
        watched_in: object,
    ) -> None:
        self.recording, self.host, self.plan = recording, host, plan
        self.training: TrainingThread = training
        """The thread whose steps it counts with; `join` changes it."""
        self.watched_in = watched_in
        """The thread that called `watch`."""
        self.has_run = False
        """Whether a forward pass with gradients on, or an optimizer step, was seen."""
        self.is_trained = False
        """Whether an optimizer has updated it, or the user has ended a step of it."""
        self.names: ModelNames = ModelNames(model, prefix=plan.prefix)
        self._select()
        asked, tell = recording.settings, self._note_unreadable
        self.reducer: Reducer = Reducer(
            hist_samples=asked.hist_samples, max_rows=asked.activation_rows, on_unreadable=tell
        )
        self.sites = SiteIds(recording.writer)
        self.optimizer_pass = OptimizerPass(self.reducer)
        self.addends = AddendCollector(self.sites, self._note_unreadable_site)
        self.prediction = UpdatePrediction(recording, self.reducer, self.sites)
        self.wants_activations = self.wants_activation_grads = self.wants_inspection = self.wants_scalars = False
        self._wants_forward = True
        self.wants: dict[str, bool] = {}
        self.histogram = False
        self.meter = training.governing.meter
        self._is_sharded = has_shards(model)
        training.governing.governor.is_aligned |= self._is_sharded
        self._step = -1
        """The step for which the current plan was made."""
        self._quiet_until, self._version = -1, 0
        """Before this step nothing is recorded, as long as the governor's version stays the same."""
        self._part = 0, 1
        """(number, parts): which of the modules record their activations in this step."""
        self.main_kind = ""
        """The kind that causes most of this step's cost."""
        self.without_grad: set[str] = set()
        """Names of parameters seen without a gradient, with one, and in an optimizer."""
        self.with_grad: set[str] = set()
        self.in_optimizer: set[str] = set()
        self.unreadable: dict[str, str] = {}
        self._kept: list[Table] = []
        """Sketches of this step, removed from the reducer before a forward pass that may belong to the next one."""
        self._num_ones = self._num_cut = 0
        self.is_allowed = True
        self._has_other_ranks = world_size() > 1
        self._root = root = self.names.place(model)
        self.nonfinite = NonFiniteWatch(recording.writer, root.name if root else "") if asked.check_finite else None
        self.inspection = Inspection(self.names, recording.warn_once, recording.breaker)
        self.loss_name = ""
        self._is_inspecting = repr(plan.inspect) != "never"
        self._schedules = self._scheduled()
        self._attach(host, optimizers)
        self._note_shares()
        self.begin_step(training.steps.number)
        self._tell_scripted()

    def _attach(self, host: ModelHost, optimizers: list[Optimizer] | None) -> None:
        """Tap forward passes, optimizer steps and clipping."""
        recording, plan, on_error = self.recording, self.plan, self.recording.breaker
        self.clips = ClipTap(on_error)
        self.forward_seen = partial(host.forward_seen, self)
        self.entry = EntryTap(
            self.names,
            self._entered,
            on_error,
            on_call=partial(host.model_begins, self),
            is_over=partial(host.is_resting, self),
        )
        self.forward = ForwardTap(
            self.names,
            self,
            on_error,
            on_root=partial(host.model_returned, self),
            on_evaluated=partial(host.model_evaluated, self),
            on_number=partial(host.number_returned, self),
            on_recomputed=self._recomputed,
        )
        self.backward = BackwardTap(self._wants_loss, self._loss_known, on_error) if self.nonfinite else None
        self.in_graph: InGraphTaps | None = None
        if plan.in_graph:
            from sonde.probe.in_graph import InGraphTaps  # registers an operation, which takes a while

            self.in_graph = InGraphTaps(self.names, self, on_error)
        self.optimizers = OptimizerTap(
            self.names,
            optimizers,
            is_wanted=lambda: any(self.wants.values()),
            on_before=self._before_update,
            on_after=self._after_update,
            on_error=on_error,
            take_clips=self.clips.take,
            on_failed=self._void,
            on_unnamed=self._tell_unnamed,
            hooks=host.hooks,
        )
        self.optimizer_scalars: OptimizerScalars = OptimizerScalars(
            self.names, self.optimizers, host.optimizer_names, host.optimizer_taps
        )
        self.unseen_updates = UnseenUpdates(recording, self.names, self.optimizers, host.is_fresh)

    def detach(self) -> None:
        """Remove every hook and wrapper."""
        self.entry.detach()
        self.forward.detach()
        if self.backward is not None:
            self.backward.detach()
        if self.in_graph is not None:
            self.in_graph.detach()
        self.optimizers.detach()
        self.clips.detach()
        self.inspection.detach()
        # Not left to the garbage collector: the copies of the parameters are as large as the model.
        self.reducer.forget()
        self.optimizer_pass.forget()
        self.prediction.step_pass.forget()

    # ------------------------------------------------------------------------------------------------------------ steps

    def join(self, training: TrainingThread) -> None:
        """Record at the steps of this training thread from now on."""
        self.training, self.meter = training, training.governing.meter
        self._quiet_until = -1
        self._note_shares()
        if self._step != training.steps.number:
            self.begin_step(training.steps.number)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Record numbers of this model, by default at the step of the thread that trains it."""
        log_values(self.recording, self.training, values, step)

    def begin_step(self, step: int) -> None:
        """Decide, once per step, what this step will record."""
        self._step = step
        self.is_allowed = not self.recording.breaker.is_open
        governor = self.training.governing.governor
        if step < self._quiet_until and governor.version == self._version:
            return  # like the step before
        asked = [name for name, schedule in self._schedules if schedule(step)] if self.is_allowed else []
        chosen = governor.choose(step, {OF_KIND[name] for name in asked}) if asked else ()
        wanted = {name for name in asked if OF_KIND[name] in chosen}
        self.wants = {kind: kind in wanted for kind in ("param", "grad", "update", "optim")}
        self.wants_activations = "activations" in wanted
        self.wants_activation_grads = "activation_grads" in wanted
        self.wants_inspection = "inspect" in wanted
        self.wants_finite = "finite" in wanted
        self.wants_scalars = "scalars" in wanted
        self._part = governor.turn("activations")
        self._version, self._quiet_until = governor.version, -1
        if not wanted:
            self._quiet_until = self.training.governing.quiet_until({OF_KIND[name] for name, _ in self._schedules})
        self._wants_forward = (
            self.wants_activations or self.wants_activation_grads or self.wants_inspection or self.wants_finite
        )
        self.main_kind = self._main_kind()
        self.inspection.begin_step(is_wanted=self.wants_inspection, part=governor.turn("inspect"))
        self.histogram = step % self.recording.settings.hist_every == 0
        self._num_ones = self._num_cut = 0

    def next_recorded(self, after: int) -> int:
        """The first step after this one that may record something."""
        return self.training.governing.next_recorded(after, self._schedules)

    def rest(self, *, is_on: bool) -> None:
        """Record nothing and see no module, or see them again."""
        taps: list[ClipTap | BackwardTap] = [self.clips]
        if self.backward is not None:
            taps.append(self.backward)
        if not is_on:
            self.forward.resume()
            for tap in taps:
                tap.resume()
            return
        self.wants = dict.fromkeys(self.wants, False)
        self.wants_activations = self.wants_activation_grads = self.wants_inspection = False
        self.wants_finite = self.wants_scalars = self._wants_forward = False
        self.main_kind, self._quiet_until = "", -1
        self.inspection.begin_step(is_wanted=False)
        for tap in taps:
            tap.pause()
        model = self.names.model()
        if model is not None and not num_compiled_frames() and not has_compiled_parts(model):
            self.forward.pause()  # a program compiled without our hook would be compiled again with it

    def _scheduled(self) -> list[tuple[str, Schedule]]:
        """The kinds that may be recorded at all, and when."""
        plan = self.plan
        schedules = {
            "grad": plan.grads,
            "param": plan.params,
            "update": plan.updates,
            "optim": plan.optim,
            "activations": plan.activations,
            "activation_grads": plan.activation_grads,
            "inspect": plan.inspect,
            "finite": ALWAYS if self.nonfinite is not None else NEVER,
            "scalars": ALWAYS,
        }
        return [(name, schedule) for name, schedule in schedules.items() if schedule is not NEVER]

    def _note_shares(self) -> None:
        for name, schedule in self._schedules:
            self.training.governing.governor.want(OF_KIND[name], schedule.share)

    def _main_kind(self) -> str:
        if any(self.wants[kind] for kind in ("param", "update", "optim")):
            return "optimizer"
        if self.wants["grad"]:
            return "grads"
        return "activations" if self.wants_activations or self.wants_activation_grads else ""

    @property
    def has_seen_gradients(self) -> bool:
        """Whether this model has been trained since it is watched."""
        return bool(self.in_optimizer or self.with_grad)

    @property
    def is_recording(self) -> bool:
        return self.wants_activations or self.wants_activation_grads or any(self.wants.values())

    @property
    def is_idle(self) -> bool:
        return not (self._wants_forward or self.host.is_keeping_tensors or self.training.steps.wants_part(self))

    # ---------------------------------------------------------------------------------------------------- tap callbacks

    def _entered(self) -> None:
        if self.forward.entered():
            self.host.model_entered(self)
            if self.nonfinite is not None:
                with quiet():
                    self.nonfinite.begin(self.training.steps.number)

    def _recomputed(self, place: ModuleRef, output: Any) -> None:
        if self.nonfinite is not None and self.wants_finite and place.is_selected:
            self.nonfinite.recomputed(place, output)

    def _wants_loss(self) -> bool:
        return self.nonfinite is not None and self.wants_finite and self.nonfinite.wants_loss()

    def _loss_known(self, roots: list[Root], is_graph_kept: bool) -> None:
        if self.nonfinite is not None:
            with quiet(), self.meter.span("finite"):
                self.nonfinite.loss_known([root.value for root in roots], self.training.steps.number)

    def is_root(self, place: ModuleRef) -> bool:
        return place is self._root

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        if self.nonfinite is not None and self.wants_finite and (place.is_selected or place is self._root):
            is_leaf, step = not module._modules, self.training.steps.number
            if place is self._root:
                with self.meter.span("finite"):
                    self.nonfinite.called(place, is_leaf, args, output, step)
            else:
                self.nonfinite.called(place, is_leaf, args, output, step)
        if self.wants_inspection:
            with self.meter.span("inspect"):
                self.inspection.module_called(place, module, args, output, self.training.steps.number)
        if self.host.is_keeping_tensors:
            self.host.module_returned(self, place, output)

    def activation(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        if place.is_in(self._part):
            self._one("act", place, suffix, tensor)

    def activation_grad(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        if place.is_in(self._part):
            self._one("actgrad", place, suffix, tensor)

    def _one(self, kind: Kind, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        self._num_ones += 1
        if self._num_ones > MAX_ONES:
            self._tell_no_end()
            return
        self.meter.see(tensor)
        histogram = self.histogram and self._num_ones <= MAX_SAMPLED
        with self.meter.span("activations"):
            self.reducer.add(self.sites.of_place(kind, place, suffix, tensor), tensor, histogram=histogram)

    # ---------------------------------------------------------------------------------------- passes of unknown purpose

    def cut(self) -> Measured:
        """Measurements since the last cut, for another step or for none."""
        with quiet(), self.meter.span("activations" if self._num_ones else ""):
            tables = self.reducer.cut()
            looks = self.nonfinite.cut(self.training.steps.number) if self.nonfinite is not None else None
        num_ones, self._num_cut = self._num_ones - self._num_cut, self._num_ones
        return Measured(tables, looks, num_ones)

    def keep(self, measured: Measured) -> None:
        self._kept += measured.tables
        if self.nonfinite is not None and measured.looks is not None:
            self.nonfinite.keep(measured.looks)

    def retire(self, measured: Measured) -> Measured:
        """A non-finite value is reported at once: the program may have skipped the batch because of it."""
        if self.nonfinite is not None and measured.looks is not None:
            self.nonfinite.drop(measured.looks, self.training.steps.number)
        return measured._replace(looks=None)

    def drop(self, measured: Measured) -> None:
        self._num_ones -= measured.num_ones
        self._num_cut -= measured.num_ones
        self.retire(measured)

    def restart(self) -> None:
        """The previous pass may not have belonged to the step."""
        self.inspection.restart()
        self.host.pass_restarted(self)

    # --------------------------------------------------------------------------------------------------- optimizer step

    def _before_update(self, step: OptimizerStep) -> None:
        self.in_optimizer.update(named.name for named in step.names)
        self.in_optimizer.update(named.name for named, _ in step.unreadable)
        num_before = self.reducer.num_tables
        step.measuring = self.host.optimizer_step(self, step)
        next(step.measuring, None)
        step.tables = self.reducer.held_since(num_before)

    def _after_update(self, step: OptimizerStep) -> None:
        if step.measuring is not None:
            next(step.measuring, None)

    def read_before(self, step: OptimizerStep) -> None:
        """Split the parameters by whether they have a gradient; predict the step where its formula is known; sketch the
        gradients; sketch and copy the parameters that no formula covers."""
        if step.params:
            self.meter.see(step.params[0])
        with self.meter.span(self.main_kind):
            for named, what in step.unreadable:
                self._note_unreadable_site(f"param/{named.name}", what)
            step.parts = split_by_grad(step, is_made=not (step.has_closure or step.is_made))
            for part in step.parts if not step.is_made else ():
                self._predict(step, part)
        if self.wants["grad"] and not step.has_closure and not step.is_made:
            is_read = all(part.is_predicted for part in step.parts)
            with self.meter.span(self.main_kind if is_read else "grads"):
                self._grads(step, step.parts)
        with self.meter.span(self.main_kind):
            self._keep(step)

    def _void(self, step: OptimizerStep) -> None:
        """The step failed. Discard its measurements: they would be merged with those of the next step."""
        self.reducer.drop(step.tables)
        void = {id(table) for table in step.tables}
        self._kept = [table for table in self._kept if id(table) not in void]

    def _keep(self, step: OptimizerStep) -> None:
        """Sketch and copy the parameters that cannot be predicted."""
        for part in step.parts:
            if not part.is_predicted:
                self.optimizer_pass.before(
                    (step.number, part.name),
                    self.sites.of_part("param", part),
                    part.local_params,
                    sketch=self.wants["param"],
                    keep=self.wants["update"] and not step.is_made,
                    pairs=self.wants["optim"],
                    histogram=self.histogram,
                )

    def note_weights(self, step: OptimizerStep) -> None:
        """Log the fingerprint of the weights that the other ranks compare theirs with."""
        model = self.names.model()
        is_asked = self._has_other_ranks and step.number == 0 and is_due(self.training.steps.number)
        if model is None or not is_asked:
            return
        if self._is_sharded:
            self.recording.writer.note(holds=part_keys(model))
            self.log({f"model/weights/{name}": value for name, value in part_fingerprints(model).items()})
        else:
            value = model_fingerprint(model)
            if value is not None:
                self.log({"model/weights/fingerprint": value})

    def _predict(self, step: OptimizerStep, part: ParameterSubset) -> None:
        tables = self.prediction.before(step, part, self.wants, histogram=self.histogram)
        if tables is None:
            return
        part.is_predicted = True
        factors = self._clipped(step, part)
        for table in tables if factors else ():
            set_raw(table, factors)

    def read_grads(self, step: OptimizerStep) -> None:
        """Sketch the gradients of a step that has computed them itself, or of a loop without an optimizer."""
        if self.wants["grad"]:
            self._grads(step, split_by_grad(step, is_made=True))

    def _grads(self, step: OptimizerStep, parts: list[ParameterSubset]) -> None:
        for part in parts:
            (self.with_grad if part.has_grads else self.without_grad).update(named.name for named in part.names)
            if part.is_predicted or not part.has_grads:
                continue
            readable, grads = part.with_plain_grads()
            keys = self.sites.of_part("grad", readable)
            tables = self.reducer.add_all(("grad", step.number), keys, grads, histogram=self.histogram)
            factors = self._clipped(step, readable)
            for table in tables:
                if step.grad_scale is not None:
                    scale_rows(table, 1.0 / step.grad_scale)
                if factors:
                    set_raw(table, factors)

        if step.is_sharded:
            self.addends.collect(step, parts)

    def _clipped(self, step: OptimizerStep, part: ParameterSubset) -> dict[int, Any]:
        """The factors that the gradients of these sites were multiplied by."""
        factors = step.clips.factors
        if not factors:
            return {}
        pairs = zip(self.sites.of_part("grad", part), part.params, strict=True)
        return {key: factors[id(p)] for key, p in pairs if id(p) in factors}

    def read_updates(self, step: OptimizerStep) -> None:
        if not self.wants["update"]:
            return
        for part in step.parts:
            if part.is_predicted:
                self.prediction.after(step, part.name)
                continue
            self.optimizer_pass.after(
                (step.number, part.name),
                self.sites.of_part("update", part),
                part.local_params,
                # A fused optimizer unscales gradients in place, so their scaled values are not known here.
                grads=part.grads if self.wants["optim"] and step.grad_scale is None else None,
                moments=adam_moments(step.optimizer, part.params) if self.wants["optim"] else None,
                histogram=self.histogram,
            )

    def read_states(self, step: OptimizerStep) -> None:
        if not self.wants["optim"]:
            return
        keys, tensors = [], []
        left = [pair for part in step.parts if not part.is_predicted for pair in part]
        for named, parameter in left:
            for state, value in step.optimizer.state.get(parameter, {}).items():
                if is_readable(value) and is_state(str(state), value, parameter):
                    keys.append(self.sites.of_parameter("optim", named, value, f".{state}"))
                    tensors.append(local_of(value))
        self.reducer.add_all(("optim", step.number), keys, tensors, histogram=self.histogram)

    def log_optimizer(self, step: OptimizerStep) -> None:
        """Log the hyperparameters of the step, and an event if the optimizer skips it."""
        if self.wants_scalars:
            self.log(self.optimizer_scalars.rates(step))
        at = self.training.steps.number
        if self.is_recording:
            for number, values in self.optimizer_scalars.groups(step, at):
                self.log(values, step=number)
        skipped = self.optimizer_scalars.skipped(step, at)
        if skipped is not None:
            self.recording.writer.put(skipped, 8, step=at)

    def log_gradients(self, step: OptimizerStep) -> None:
        """Record clipping and gradient scalars, once the gradients exist; a closure computes them inside the step."""
        if not self.wants_scalars:
            self.inspection.skip_gradients()
            return
        values = self.optimizer_scalars.clipped(step)
        if self._is_inspecting:
            values.update(self.inspection.gradients(step))
        if values:
            self.log(values)

    # -------------------------------------------------------------------------- loops without an optimizer, and the end

    def current_step(self) -> OptimizerStep | None:
        """Record parameters and gradients as they are now, for loops with a non-torch optimizer."""
        model = self.names.model()
        if model is None:
            return None
        self.names.refresh()
        clips = self.clips.take(list(model.parameters()))
        step = OptimizerStep(None, 0, [], [], clips=clips)  # type: ignore[arg-type]
        for parameter in model.parameters():
            named = self.names.parameter(parameter)
            if named is not None and named.is_selected and is_readable(parameter):
                step.is_sharded = step.is_sharded or is_sharded(parameter)
                if placed(parameter).is_owner:
                    step.names.append(named)
                    step.params.append(parameter)
                else:
                    step.replicas.append((named, parameter))
        if step.params:
            self.meter.see(step.params[0])
        return step

    def read_params(self, step: OptimizerStep) -> None:
        if self.wants["param"]:
            part = ParameterSubset("all", step.names, step.params, is_sharded=step.is_sharded)
            keys = self.sites.of_part("param", part)
            self.reducer.add_all("param", keys, part.local_params, histogram=self.histogram)

    def take(self) -> list[Table]:
        """The sketches of the step. Resolving them waits for copies from a device."""
        kept, self._kept = self._kept, []
        return [*kept, *self.reducer.take()]

    # -------------------------------------------------------------------------------------------------------- internals

    def _select(self) -> None:
        """Select sites as requested; modules that the model gains later are selected in the same way."""
        choose, names = chooser(self.plan.sites), self.names

        def choose_place(place: ModuleRef) -> bool:
            return is_chosen(choose, place.name, place.aliases, [place.ref()])

        def choose_parameter(named: NamedParameter) -> bool:
            return is_chosen(choose, named.name, named.aliases, [owner() for owner in named.owners])

        for place in names.places.values():
            place.is_selected = choose_place(place)
        names.choose_place, names.choose = choose_place, choose_parameter
        names.refresh()
        self._tell_no_site()

    def _tell_no_site(self) -> None:
        known: list[ModuleRef | NamedParameter] = [*self.names.places.values(), *self.names.parameters.values()]
        if not any(site.is_selected for site in known):
            self.recording.warn_once(
                "no site",
                f"sites={self.plan.sites!r} matches no layer of this model, so none is recorded. Some of its sites: "
                f"{', '.join(site.name for site in known[-3:])}.",
            )

    def _tell_scripted(self) -> None:
        inside = self.names.scripted_inside() if repr(self.plan.activations) != "never" else []
        if inside:
            self.recording.warn_once(
                "scripted",
                f"torch.jit runs {len(inside)} modules of this model without Python (the first is {inside[0]}): their "
                "activations are not recorded. Parameters, gradients, updates and the output of each scripted module "
                "are.",
            )

    def _tell_no_end(self) -> None:
        self.recording.warn_once(
            "no end of a step",
            f"{MAX_ONES:,} activations without an optimizer step; recording of activations resumes at the next step. "
            "Run evaluation under torch.no_grad(), so that it does not count as part of a step.",
        )

    def _tell_unnamed(self, optimizer: Optimizer) -> None:
        self.recording.warn_once(
            "unnamed optimizer",
            f"{type(optimizer).__name__} updates parameters of this model but was not passed to watch(): its steps are "
            "not recorded. Pass it too: watch(model, [first, second]), or pass none to follow all.",
        )

    def _note_unreadable(self, key: int, why: str) -> None:
        self._note_unreadable_site(self.sites.name_of(key), why)

    def _note_unreadable_site(self, site: str, why: str) -> None:
        if site not in self.unreadable:
            self.unreadable[site] = why
            self.recording.warn_once(f"unreadable {why}", f"{site} is not recorded: unsupported tensor ({why}).")
