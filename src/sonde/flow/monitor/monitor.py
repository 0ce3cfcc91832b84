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

import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook

from sonde.display import print_line, warn
from sonde.errors import NotAModelError, UsageError
from sonde.flow.monitor.metric_store import Aggregation, MetricStore, load_hdf5, save_hdf5
from sonde.probe.guards import is_observable, quiet
from sonde.schema.names import strip_wrappers

MetricFunction = Callable[..., Any]
ROOT: Final = "[root module]"
_COMPILE_WARNING: Final = r"Using `torch\.compile\(module\)` when there are global hooks"
_KINDS: Final = (
    "activation", "activation_difference", "parameter", "parameter_difference", "gradient", "gradient_difference",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Metric:
    """A user's function, the names it applies to, and how micro-batches are combined."""

    name: str
    function: MetricFunction
    regex: re.Pattern[str]
    aggregation: Aggregation | None = None


@dataclass(slots=True)
class Call:
    """The input and output of one call of a module."""

    inputs: tuple[Any, ...]
    output: Any


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
    ) -> None:
        """`session`: the result of `sonde.init` or `sonde.watch`; metrics are then also part of that run."""
        self.monitor_step_fn = monitor_step_fn or (lambda _: True)
        self.is_enabled, self.cpu_offload, self.session = monitor, cpu_offload, session
        self.format_name = format_module_name_fn or format_module_name
        self.excluded = re.compile(excluded_modules_regex) if excluded_modules_regex else None
        self.module: nn.Module | None = None
        self.reference: nn.Module | None = None
        self.metrics: dict[str, list[Metric]] = {kind: [] for kind in _KINDS}
        self.store = MetricStore()
        self.calls: dict[str, list[Call]] = {}
        """Kept only while something, such as the coordinate check, has asked for it with `keeps_calls`."""
        self.reference_calls: dict[str, list[Call]] = {}
        self.keeps_calls = False
        self._names: dict[int, str] = {}
        self._reference_names: dict[int, str] = {}
        self._compared: dict[str, int] = {}
        self._step: int | None = None
        self._last_step: int | None = None
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

    def set_reference_module(self, module: nn.Module) -> None:
        """Set a model of the same structure, such as a copy made at initialisation; it runs first, on the same
        inputs."""
        if self.module is None:
            raise UsageError("call set_module(model) before set_reference_module(reference).")
        reference = _checked(module, "set_reference_module")
        if reference is self.module:
            raise UsageError("the reference is the model itself. Copy it:  set_reference_module(copy.deepcopy(model))")
        self._check_structure(reference)
        self.reference = reference
        self._reference_names = self._named(reference)

    def _named(self, module: nn.Module) -> dict[int, str]:
        named = {id(child): self.format_name(name) for name, child in module.named_modules()}
        return {key: name for key, name in named.items() if self.excluded is None or not self.excluded.fullmatch(name)}

    def _check_structure(self, reference: nn.Module) -> None:
        own = {self.format_name(n): tuple(p.shape) for n, p in self._required.named_parameters()}
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
    def _required(self) -> nn.Module:
        if self.module is None:
            raise UsageError("no model to monitor yet. Call:  monitor.set_module(model)")
        return self.module

    # ---------------------------------------------------------------------------------------------------------- metrics

    def add_activation_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(output)`: a number, or a tensor of numbers (one per sample, say)."""
        self._add("activation", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_activation_difference_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(output, output of the reference)`."""
        self._add("activation_difference", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_parameter_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(parameter)`, called by `monitor_parameters`."""
        self._add("parameter", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_parameter_difference_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(parameter, parameter of the reference)`."""
        self._add("parameter_difference", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_gradient_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(gradient)`, called by `monitor_gradients`."""
        self._add("gradient", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def add_gradient_difference_metric(
        self, metric_name: str, metric_fn: MetricFunction, metric_regex: str = ".*",
        metric_aggregation_fn: Aggregation | None = None,
    ) -> None:  # fmt: skip
        """`metric_fn(gradient, gradient of the reference)`; the reference needs its own backward pass."""
        self._add("gradient_difference", metric_name, metric_fn, metric_regex, metric_aggregation_fn)

    def _add(self, kind: str, name: str, function: Any, regex: str, aggregation: Any = None) -> None:
        if not callable(function):
            raise UsageError(f"the metric {name!r} must be a function; got {type(function).__name__}.")
        try:
            pattern = re.compile(regex)
        except re.error as error:
            raise UsageError(f"invalid regex for the metric {name!r}: {error}.") from error
        self.metrics[kind].append(Metric(name, function, pattern, aggregation))

    # ------------------------------------------------------------------------------------------------------------ steps

    def is_step_monitored(self, step: int) -> bool:
        return self.is_enabled and bool(self.monitor_step_fn(step))

    @property
    def is_monitoring(self) -> bool:
        """Whether a step is being monitored right now."""
        return self._step is not None and not self._is_paused

    def begin_step(self, step: int) -> None:
        self.after_micro_batch()
        self.store.discard()
        self._last_step = None
        self._step = step if self.is_step_monitored(step) else None

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
        if self.session is not None and values:
            self.session.log(values, step)

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
        for name, parameter in self._required.named_parameters():
            name = self.format_name(name)
            self._measure("parameter", name, parameter.detach())
            if name in others:
                self._measure("parameter_difference", name, parameter.detach(), others[name].detach())

    def monitor_gradients(self, before_clip: bool = False) -> None:
        """Gradient metrics; with `before_clip` they are named `gradient_before_clip/…`."""
        if not self.is_monitoring:
            return
        others = self._reference_parameters()
        for name, parameter in self._required.named_parameters():
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
            self._measure("activation", name, self._moved(activation))

    def log_tensor(self, key: str, tensor: Tensor, aggregation_fn: Aggregation | None = None) -> None:
        """Log your own tensor of numbers; micro-batches are combined by their mean, or by `aggregation_fn`."""
        if self.is_monitoring:
            self.store.add(key, self._moved(tensor), aggregation_fn)

    def log_scalar(self, key: str, value: float | Tensor) -> None:
        if self.is_monitoring:
            self.store.add(key, value)

    def _reference_parameters(self) -> dict[str, nn.Parameter]:
        if self.reference is None:
            return {}
        return {self.format_name(name): parameter for name, parameter in self.reference.named_parameters()}

    def _measure(self, kind: str, name: str, *tensors: Any, prefix: str = "") -> None:
        for metric in self.metrics[kind]:
            if not metric.regex.fullmatch(name):
                continue
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
            try:
                warn(message, stacklevel=4)
            except UserWarning:
                print_line(message)

    # ------------------------------------------------------------------------------------------------------------- hook

    def _attach(self) -> None:
        """One hook for all modules, so that none of them keeps a trace; it lives as long as the monitor."""
        if self._handle is None:
            alive = weakref.WeakMethod(self._seen)

            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                seen = None if torch.compiler.is_compiling() else alive()
                if seen is not None:
                    seen(module, args, output)

            # torch warns that such a hook also fires for a compiled wrapper, which is what we want.
            warnings.filterwarnings("ignore", message=_COMPILE_WARNING, category=UserWarning)
            handle = register_module_forward_hook(hook, with_kwargs=True)
            self._handle = weakref.finalize(self, _remove, handle, warnings.filters[0])

    def detach(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle()
            self._handle = None

    def _seen(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.is_monitoring or not is_observable():
            return
        name = self._names.get(id(module))
        if name is not None:
            self._activation(name, args, output)
            return
        name = self._reference_names.get(id(module))
        if name is not None and self._needs_reference:
            kept = Call(self._kept(args), self._moved(output))
            self.reference_calls.setdefault(name, []).append(kept)

    @property
    def _needs_reference(self) -> bool:
        return self.keeps_calls or bool(self.metrics["activation_difference"])

    def _activation(self, name: str, args: Any, output: Any) -> None:
        if self.keeps_calls:
            self.calls.setdefault(name, []).append(Call(self._kept(args), self._moved(output)))
        if not isinstance(output, Tensor):
            return
        activation = self._moved(output)
        self._measure("activation", name, activation)
        if not self.metrics["activation_difference"] or self.reference is None:
            return
        index = self._compared.get(name, 0)
        self._compared[name] = index + 1
        other = self.reference_calls.get(name, [])
        if index < len(other) and isinstance(other[index].output, Tensor):
            self._compare(name, activation, other[index].output)
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

    def _kept(self, args: Any) -> tuple[Any, ...]:
        return tuple(self._moved(a) if isinstance(a, Tensor) else a for a in args)

    def _moved(self, value: Any) -> Any:
        """Detached; on the host on request. A copy, because a later in-place operation would change it."""
        if not isinstance(value, Tensor):
            return value
        tensor = value.detach()
        return tensor.cpu() if self.cpu_offload and tensor.device.type != "cpu" else tensor.clone()


class MonitorMixin:
    """For modules that log their own numbers: `self.get_module_monitor().log_tensor("…", tensor)`."""

    def set_module_monitor(self, monitor: ModuleMonitor) -> None:
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


def _remove(handle: Any, silence: Any) -> None:
    handle.remove()
    if silence in warnings.filters:
        warnings.filters.remove(silence)  # type: ignore[attr-defined]
    # torch forgets to remove this mark, and continues as if there were a hook.
    getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)


def _checked(module: object, what: str) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise NotAModelError(f"{what}() takes a torch.nn.Module; got {type(module).__name__}.")
    return module
