"""ModuleMonitor: any function of any activation, parameter or gradient, chosen by name, combined over micro-batches.

    monitor = ModuleMonitor(monitor_step_fn=lambda step: step % 10 == 0)
    monitor.set_module(model)
    monitor.add_activation_metric("norm", lambda x: x.norm(dim=-1), metric_regex=r".*mlp.*")
    for step, (x, y) in enumerate(batches):
        monitor.begin_step(step)
        loss_fn(model(x), y).backward()
        monitor.monitor_parameters()
        monitor.monitor_gradients()
        optimizer.step()
        monitor.end_step()
        metrics = monitor.get_step_metrics()

A metric that fails is reported once and skipped; the model keeps no trace of the monitor except what `MonitorMixin`
asks for.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor, nn

from sonde.display import print_line, warn
from sonde.errors import NotAModelError, UsageError
from sonde.flow.monitor.hook import attach
from sonde.flow.monitor.metric_store import Aggregation, MetricStore, load_hdf5, save_hdf5
from sonde.flow.monitor.metrics import MetricFunction, MetricSet, compiled
from sonde.probe.guards import is_observable, quiet
from sonde.probe.outputs import floating_tensors
from sonde.schema.names import strip_wrappers

ROOT: Final = "[root module]"


@dataclass(slots=True)
class Call:
    """Copies of the inputs and output tensors of one call of a module."""

    inputs: tuple[Any, ...]
    outputs: Mapping[str, Tensor]
    """By suffix: "" for the first, or only, tensor; ":1" or ":key" for further ones."""


def format_module_name(name: str) -> str:
    """The name the user wrote, without wrapper prefixes; the model itself has none, and gets one."""
    return strip_wrappers(name) or ROOT


class ModuleMonitor:
    """Collects metrics of one model, and compares it with a reference if there is one."""

    def __init__(
        self,
        monitor_step_fn: Callable[[int], bool] | None = None,
        *,
        monitor: bool = True,
        cpu_offload: bool = False,
        excluded_modules_regex: str | None = None,
        format_module_name_fn: Callable[[str], str] | None = None,
        session: Any = None,
        logger: logging.Logger | None = None,
    ) -> None:
        """`session`: the result of `sonde.init` or `sonde.watch`; metrics are then also part of that run. `logger`
        receives the number of metrics and their size after each step, and warnings, which are otherwise Python's."""
        self.monitor_step_fn = monitor_step_fn or (lambda _: True)
        self.is_enabled, self.cpu_offload, self.session = monitor, cpu_offload, session
        self.format_name = format_module_name_fn or format_module_name
        self.logger = logger
        self.excluded = compiled(excluded_modules_regex, "excluded_modules_regex") if excluded_modules_regex else None
        self.module: nn.Module | None = None
        self.reference: nn.Module | None = None
        self.metrics = MetricSet()
        self.store = MetricStore()
        self.calls: dict[str, list[Call]] = {}
        """Kept only while something, such as the coordinate check, has asked for it with `keeps_calls`."""
        self.reference_calls: dict[str, list[Call]] = {}
        self.keeps_calls = False
        self._names: dict[int, str] = {}
        self._reference_names: dict[int, str] = {}
        self._compared: dict[str, int] = {}
        self._more_names: dict[str, None] = {}
        """Names that are not modules: further tensors of an output, and those of `monitor_activation`."""
        self._step: int | None = None
        self._last_step: int | None = None
        self._begun_step: int | None = None
        self._is_paused = False
        self._told: set[str] = set()
        self._handle: Any = None

    # ----------------------------------------------------------------------------------------------------------- models

    def set_module(self, module: nn.Module) -> None:
        """Set the model to monitor. Modules that are `MonitorMixin` get a reference to the monitor."""
        self.module = _checked(module, "set_module")
        self._names = self._named(module)
        for child in module.modules():
            if isinstance(child, MonitorMixin):
                child.set_module_monitor(self)
        self._attach()

    def name_of(self, module: nn.Module | str) -> str:
        """The name of a module of the model in the metrics."""
        if isinstance(module, str):
            return module
        if id(module) not in self._names:
            raise UsageError(f"{type(module).__name__} is not a module of the monitored model, or is excluded.")
        return self._names[id(module)]

    def set_reference_module(self, module: nn.Module | None) -> None:
        """Set a model of the same structure, such as a copy made at initialisation; it runs first, on the same
        inputs. None removes it."""
        if module is None:
            self.remove_reference_module()
            return
        if self.module is None:
            raise UsageError("call set_module(model) before set_reference_module(reference).")
        reference = _checked(module, "set_reference_module")
        if reference is self.module:
            raise UsageError("the reference is the model itself. Copy it:  set_reference_module(copy.deepcopy(model))")
        self._check_structure(reference)
        self.remove_reference_module()
        self.reference = reference
        self._reference_names = self._named(reference)

    def has_reference_module(self) -> bool:
        return self.reference is not None

    def remove_reference_module(self) -> None:
        """Stop comparing with the reference, and release it."""
        self.reference = None
        self._reference_names = {}
        self.reference_calls.clear()
        self._compared.clear()

    def _named(self, module: nn.Module) -> dict[int, str]:
        named = {id(child): self.format_name(name) for name, child in module.named_modules()}
        return {key: name for key, name in named.items() if self.excluded is None or not self.excluded.match(name)}

    def _check_structure(self, reference: nn.Module) -> None:
        own = {self.format_name(n): tuple(p.shape) for n, p in self.required_module.named_parameters()}
        other = {self.format_name(n): tuple(p.shape) for n, p in reference.named_parameters()}
        different = [name for name in own if name in other and own[name] != other[name]]
        missing = sorted(own.keys() ^ other.keys())
        if missing:
            raise UsageError(
                f"the reference has a different structure: only one of the two has {', '.join(missing[:5])}"
                f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}."
            )
        if different:
            name = different[0]
            raise UsageError(
                f"the reference has a different structure: {name} is {own[name]} in the model, {other[name]} in the "
                "reference."
            )

    @property
    def required_module(self) -> nn.Module:
        if self.module is None:
            raise UsageError("no model to monitor yet. Call:  monitor.set_module(model)")
        return self.module

    # ---------------------------------------------------------------------------------------------------------- metrics

    def add_activation_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(output)`: a number, or a tensor of numbers (one per sample, say)."""
        self.metrics.add("activation", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_activation_difference_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(output, output of the reference)`."""
        self.metrics.add("activation_difference", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_parameter_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(parameter)`, called by `monitor_parameters`."""
        self.metrics.add("parameter", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_parameter_difference_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(parameter, parameter of the reference)`."""
        self.metrics.add("parameter_difference", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_gradient_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(gradient)`, called by `monitor_gradients`."""
        self.metrics.add("gradient", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_gradient_difference_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(gradient, gradient of the reference)`; the reference needs its own backward pass."""
        self.metrics.add("gradient_difference", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    # ------------------------------------------------------------------------------------------------------------ steps

    def is_step_monitored(self, step: int) -> bool:
        return self.is_enabled and bool(self.monitor_step_fn(step))

    @property
    def is_monitoring(self) -> bool:
        """Whether a step is being monitored right now."""
        return self._step is not None and not self._is_paused

    def begin_step(self, step: int) -> bool:
        """Returns whether this step is monitored."""
        self.after_micro_batch()
        self.store.discard()
        self._last_step, self._begun_step = None, step
        self._step = step if self.is_step_monitored(step) else None
        return self._step is not None

    def after_micro_batch(self) -> None:
        """Discard the outputs of the reference: the next micro-batch has other inputs."""
        self.calls.clear()
        self.reference_calls.clear()
        self._compared.clear()

    def end_step(self) -> None:
        """Combine the micro-batches, and pass the numbers to the run if there is one."""
        if self._step is None:
            return
        step, self._step = self._step, None
        values = self.store.close(step, self.report)
        self._last_step = step
        self.after_micro_batch()
        self._check_patterns()
        if self.logger is not None:
            size = f"{self.store.nbytes / 1e6:.2f} MB"
            self.logger.info("Logged %d keys at step %d. Size of all logged metrics: %s", len(values), step, size)
        if self.session is not None and values:
            self.session.log(values, step)

    def _check_patterns(self) -> None:
        if self.module is not None:
            parameters = (self.format_name(name) for name, _ in self.module.named_parameters())
            for message in self.metrics.unmatched([*self._names.values(), *self._more_names], parameters):
                self._warn(message, message)

    @contextmanager
    def no_monitor(self) -> Iterator[None]:
        """Pause monitoring, for instance during an evaluation."""
        was, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was

    def get_step_metrics(self, step: int | None = None) -> dict[str, float]:
        """The metrics of a step, by default the last one; empty if it was not monitored."""
        wanted = self._last_step if step is None else step
        return dict(self.store.steps.get(wanted, {})) if wanted is not None else {}

    def get_all_metrics(self) -> Mapping[int, Mapping[str, float]]:
        return self.store.steps

    def save_hdf5(self, path: str | Path) -> Path:
        return save_hdf5(path, self.store.steps)

    @staticmethod
    def load_hdf5(path: str | Path) -> dict[int, dict[str, float]]:
        return load_hdf5(path)

    # ------------------------------------------------------------------------------------------------------- collection

    def monitor_parameters(self) -> None:
        """Parameter metrics, and their differences from the reference."""
        if not self.is_monitoring:
            return
        others = self._reference_parameters()
        for name, parameter in self.required_module.named_parameters():
            name = self.format_name(name)
            self._measure("parameter", name, parameter.detach())
            if name in others:
                self._measure("parameter_difference", name, parameter.detach(), others[name].detach())

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """Gradient metrics; with `before_clip` they are named `gradient_before_clip/…`."""
        if not self.is_monitoring:
            return
        others = self._reference_parameters()
        for name, parameter in self.required_module.named_parameters():
            name = self.format_name(name)
            if parameter.grad is None:
                continue
            self._measure(
                "gradient", name, parameter.grad.detach(), prefix="gradient_before_clip" if before_clip else ""
            )
            other = others[name].grad if name in others else None
            if other is not None and not before_clip:
                self._measure("gradient_difference", name, parameter.grad.detach(), other.detach())

    def monitor_activation(self, name: str, activation: Tensor) -> None:
        """Activation metrics of a tensor that no module returns, under a name of your choice."""
        if self.is_monitoring:
            self._more_names[name] = None
            self._measure("activation", name, self._moved(activation))

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: Aggregation | None = None) -> None:
        """Log your own tensor of numbers; micro-batches are combined by their mean, or by `aggregation_fn`."""
        if self.is_monitoring:
            self.store.add(key, self._moved(tensor), aggregation_fn)

    def log_scalar(
        self, key: str, value: float | Tensor, aggregation_fn: Aggregation | None = None, force: bool = False
    ) -> None:
        """Log your own number. With `force`, also in a step that is not monitored: it then replaces an earlier one."""
        if self.is_monitoring:
            self.store.add(key, value, aggregation_fn)
        elif force:
            self._log_now(key, value)

    def log_scalars(self, monitor_dict: Mapping[str, float | Tensor], force: bool = False) -> None:
        """Log several numbers of your own by name."""
        for key, value in monitor_dict.items():
            self.log_scalar(key, value, force=force)

    def _log_now(self, key: str, value: float | Tensor) -> None:
        step = self._begun_step
        if step is None:
            self._warn("no step", f"sonde: {key} is not logged: call monitor.begin_step(step) first.")
            return
        self.store.put(step, key, value)
        self._last_step = step
        if self.session is not None:
            self.session.log({key: value}, step)

    def _reference_parameters(self) -> dict[str, nn.Parameter]:
        if self.reference is None:
            return {}
        return {self.format_name(name): parameter for name, parameter in self.reference.named_parameters()}

    def _measure(self, kind: str, name: str, *tensors: Any, prefix: str = "") -> None:
        for metric in self.metrics.matching(kind, name):
            key = f"{prefix or kind}/{name}/{metric.name}"
            try:
                with quiet():
                    value = metric.function(*tensors)
                self.store.add(key, value, metric.aggregation)
            except Exception as error:  # noqa: BLE001 - a user's metric that fails must not end the training
                self.report(key, error, once=f"{kind} {metric.name}")

    def report(self, key: str, error: Exception, once: str = "") -> None:
        """Report once that a metric failed."""
        self._warn(once or key, f"sonde: the metric {key} failed and is skipped: {error!r}")

    def _warn(self, about: str, message: str) -> None:
        """Warn once per key. If warnings are errors it is printed: it must not end the training."""
        if about not in self._told:
            self._told.add(about)
            if self.logger is not None:
                self.logger.warning(message)
                return
            try:
                warn(message, stacklevel=4)
            except UserWarning:
                print_line(message)

    # ------------------------------------------------------------------------------------------------------------- hook

    def _attach(self) -> None:
        """One hook for all modules, so that none of them keeps a trace; it lives as long as the monitor."""
        if self._handle is None:
            self._handle = attach(self)

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle()
            self._handle = None

    def seen(self, module: nn.Module, args: Any, output: Any) -> None:
        """Called by the hook after every module of the process."""
        if not self.is_monitoring or not is_observable():
            return
        name = self._names.get(id(module))
        if name is not None:
            self._activation(name, args, output)
            return
        name = self._reference_names.get(id(module))
        if name is not None and self._needs_reference:
            self.reference_calls.setdefault(name, []).append(self._call(args, output))

    @property
    def _needs_reference(self) -> bool:
        return self.keeps_calls or bool(self.metrics["activation_difference"])

    def _activation(self, name: str, args: Any, output: Any) -> None:
        """Every tensor of the output: the first has the module's name, further ones `name:1` or `name:key`."""
        if self.keeps_calls:
            self.calls.setdefault(name, []).append(self._call(args, output))
        for suffix, tensor in _tensors(output):
            activation = self._moved(tensor)
            if suffix:
                self._more_names[name + suffix] = None
            self._measure("activation", name + suffix, activation)
            if self.metrics["activation_difference"] and self.reference is not None:
                self._difference(name, suffix, activation)
        self._compared[name] = self._compared.get(name, 0) + 1

    def _difference(self, name: str, suffix: str, activation: Tensor) -> None:
        index, calls = self._compared.get(name, 0), self.reference_calls.get(name, [])
        others = calls[index].outputs if index < len(calls) else {}
        if suffix in others:
            self._compare(name + suffix, activation, others[suffix])
        else:
            self._warn(
                "no reference",
                "sonde: the reference has not run on this batch, so differences are left out. Run it first, under "
                "torch.no_grad().",
            )

    def _compare(self, name: str, activation: Tensor, other: Tensor) -> None:
        if activation.shape != other.shape:
            key = f"activation_difference/{name}"
            self.report(
                key, UsageError(f"{tuple(activation.shape)} in the model, {tuple(other.shape)} in the reference")
            )
            return
        self._measure("activation_difference", name, activation, other)

    def _call(self, args: Any, output: Any) -> Call:
        inputs = tuple(self._moved(a) if isinstance(a, Tensor) else a for a in args)
        return Call(inputs, {suffix: self._moved(tensor) for suffix, tensor in _tensors(output)})

    def _moved(self, tensor: Tensor) -> Tensor:
        """Detached; on the host on request. A copy, because a later in-place operation would change it."""
        tensor = tensor.detach()
        return tensor.cpu() if self.cpu_offload and tensor.device.type != "cpu" else tensor.clone()


class MonitorMixin:
    """For modules that log their own numbers: `self.get_module_monitor().log_tensor("…", tensor)`."""

    def set_module_monitor(self, monitor: ModuleMonitor | None) -> None:
        if monitor is None:
            _MONITORS.pop(self, None)
            return
        # Not an attribute of the module: a monitor holds hooks, and would go into every pickle and copy of the model.
        # Weak on both sides: the monitor holds the model, and neither would ever be freed.
        _MONITORS[self] = weakref.ref(monitor)

    def get_module_monitor(self) -> ModuleMonitor:
        """The monitor of this module; one that collects nothing if there is none."""
        known = _MONITORS.get(self)
        return (known() if known is not None else None) or _NOBODY

    @property
    def is_monitoring(self) -> bool:
        return self.get_module_monitor().is_monitoring


_MONITORS: weakref.WeakKeyDictionary[MonitorMixin, weakref.ref[ModuleMonitor]] = weakref.WeakKeyDictionary()
_NOBODY: Final = ModuleMonitor(monitor=False)


def _tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an output by their suffix. The only tensor may be of any type, such as integers."""
    return [("", output)] if isinstance(output, Tensor) else floating_tensors(output)


def _checked(module: object, what: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise NotAModelError(f"{what}() takes a torch.nn.Module; got {type(module).__name__}.")
    return module
