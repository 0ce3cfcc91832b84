"""TemporalAnalyzer: how much gradient reaches each time step of a recurrent network, and through which gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sonde.errors import UsageError
from sonde.flow.batch import LossFunction
from sonde.flow.engine import FlowAnalyzer, Observer
from sonde.flow.issue import Issue
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.report import FlowReport
from sonde.flow.trace import Trace
from sonde.probe.model import ModelNames, Place
from sonde.schema.names import as_code

WARNING: Final = 0.1
"""Change of the logarithm per time step, either way."""
CRITICAL: Final = 0.3
REACH: Final = 0.01
"""A time step counts as remembered while its gradient is above this share of the largest."""
SHORT: Final = 5
MIN_STEPS: Final = 8
GATES: Final = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new"), "RNN": ("hidden",)}


@dataclass(frozen=True, slots=True)
class TemporalMetrics:
    """Of one recurrent layer."""

    layer: str
    profile: tuple[float, ...]
    """Norm of the gradient at each time step, first to last."""
    decay_rate: float
    """Change of its logarithm per step back in time: negative where it vanishes, positive where it explodes."""
    effective_memory: int
    """How many time steps get more than 1 % of the largest gradient."""
    gates: dict[str, dict[str, float]] = field(default_factory=dict)
    """By gate: norm of gradient, of weight, and their ratio."""

    @staticmethod
    def of(layer: str, profile: Sequence[float], gates: dict[str, dict[str, float]] | None = None) -> TemporalMetrics:
        values = np.asarray(profile, float)
        return TemporalMetrics(layer, tuple(values.tolist()), _decay(values), _memory(values), gates or {})


def _decay(profile: Any) -> float:
    """From the largest gradient (at the end, as a rule) back to the first step."""
    last = int(np.nanargmax(profile)) if np.isfinite(profile).any() else 0
    back = profile[: last + 1][::-1] if last >= len(profile) // 2 else profile
    positive = np.maximum(back, 1e-300)
    if len(back) < 3 or not np.isfinite(positive).all():
        return 0.0
    slope = float(np.polyfit(np.arange(len(back)), np.log(positive), 1)[0])
    return slope if last >= len(profile) // 2 else -slope


def _memory(profile: Any) -> int:
    largest = np.nanmax(profile) if len(profile) else 0.0
    return int((profile > REACH * largest).sum()) if largest > 0 else 0


class TemporalAnalyzer:
    """For RNN, LSTM, GRU, their cells, and anything that is called once per time step.

    report = TemporalAnalyzer(sequence_length=100).analyze(model, sequences, targets, loss_fn)
    """

    def __init__(self, sequence_length: int | None = None, *, thresholds: Thresholds = RELATIVE) -> None:
        """`sequence_length`: a module of one's own that is called so often is taken to be called once per time step."""
        self.sequence_length, self.thresholds = sequence_length, thresholds
        self.metrics: dict[str, TemporalMetrics] = {}
        self._watch: _TimeWatch | None = None
        self.report: FlowReport | None = None

    def analyze(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, steps: int = 1
    ) -> FlowReport:
        report = FlowAnalyzer(model, thresholds=self.thresholds).analyze_with([self], x, y, loss_fn, steps)
        if not self.metrics:
            raise UsageError(
                "no recurrent layer was found: no nn.RNN, LSTM or GRU, no module that is called once per time step. "
                "For a loop of one's own use analyze_unrolled(cell, inputs, targets, loss_fn)."
            )
        self.report = report
        return report

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[Sequence[Observer]]:
        self._watch = watch = _TimeWatch(model, self.sequence_length or MIN_STEPS)
        with watch.inputs_with_gradients():
            yield (watch.called,)

    def conclude(self, traces: list[Trace]) -> tuple[list[Issue], dict[str, Any]]:
        watch, self._watch = self._watch, None
        assert watch is not None
        gates = watch.gates()
        self.metrics = {name: TemporalMetrics.of(name, p, gates.get(name)) for name, p in watch.profiles().items()}
        issues = [issue for metrics in self.metrics.values() for issue in temporal_issues(metrics, watch.types)]
        return issues, {"temporal": {name: asdict(metrics) for name, metrics in self.metrics.items()}}

    def analyze_unrolled(
        self,
        cell: Callable[[Tensor, Any], Any],
        inputs: Tensor,
        targets: Any,
        loss_fn: LossFunction,
        hidden: Any = None,
        name: str = "cell",
    ) -> TemporalMetrics:
        """Unroll `hidden = cell(x_t, hidden)` over inputs (time, batch, …); the loss is of the last hidden state.

        A cell that returns (output, hidden) is understood; so is an LSTM's (h, c).
        """
        grads: dict[int, float] = {}
        with torch.enable_grad():
            output: Any = None
            for t, x in enumerate(inputs):
                sample = x.detach().clone().requires_grad_(True) if x.is_floating_point() else x
                if isinstance(sample, Tensor) and sample.requires_grad:
                    sample.register_hook(_noter(grads, t))  # type: ignore[no-untyped-call]
                result = cell(sample, hidden)
                output, hidden = (
                    result if isinstance(result, tuple) and not _is_state(cell, result) else (result, result)
                )
            prediction = output[0] if isinstance(output, tuple) else output
            wanted = [p for p in getattr(cell, "parameters", list)() if p.requires_grad]
            loss = loss_fn(prediction, targets)
            saved = [(p, p.grad) for p in wanted]
            loss.backward()
            for parameter, grad in saved:
                parameter.grad = grad
        self.metrics[name] = TemporalMetrics.of(name, [grads.get(t, 0.0) for t in range(len(inputs))])
        return self.metrics[name]

    def get_temporal_metrics(self) -> dict[str, TemporalMetrics]:
        return dict(self.metrics)

    def get_timestep_profile(self, layer: str | None = None) -> list[float]:
        """Gradient at each time step: of a layer, or of the first there is."""
        return list(self._of(layer).profile)

    def get_effective_memory(self, layer: str | None = None) -> dict[str, int] | int:
        """Time steps that are remembered: of one layer, or of each."""
        if layer is not None:
            return self._of(layer).effective_memory
        return {name: metrics.effective_memory for name, metrics in self.metrics.items()}

    def _of(self, layer: str | None) -> TemporalMetrics:
        if not self.metrics:
            raise UsageError("nothing has been analysed yet. Call analyze(model, x, y, loss_fn) first.")
        if layer is None:
            return next(iter(self.metrics.values()))
        if layer not in self.metrics:
            raise UsageError(f"no recurrent layer {layer!r}; there are {', '.join(self.metrics)}.")
        return self.metrics[layer]


def _is_state(cell: Any, result: tuple[Any, ...]) -> bool:
    """An LSTM cell's (h, c) is one state; (output, hidden) of a cell of one's own is two things."""
    return isinstance(cell, nn.LSTMCell) or len(result) != 2


def _noter(grads: dict[int, float], t: int) -> Callable[[Tensor], None]:
    def note(grad: Tensor) -> None:
        grads[t] = grads.get(t, 0.0) + float(grad.detach().float().norm())

    return note


class _TimeWatch:
    """Gradients by time step, during one analysis."""

    def __init__(self, model: nn.Module, min_steps: int) -> None:
        self.min_steps = min_steps
        self.names = ModelNames(model)
        self.model = model
        self.types: dict[str, str] = {}
        self._gates: dict[str, tuple[tuple[str, ...], dict[str, list[Tensor]]]] = {}
        self._sequences: dict[str, Tensor] = {}
        self._calls: dict[str, list[Tensor | None]] = {}

    @contextmanager
    def inputs_with_gradients(self) -> Iterator[None]:
        """Give the inputs of recurrent layers a gradient where the data have none."""
        recurrent = [m for m in self.model.modules() if _is_recurrent(m)]
        handles: list[Any] = [m.register_forward_pre_hook(self._before) for m in recurrent]
        for module in recurrent:
            handles += self._watch_gates(module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        place = self.names.place(module)
        if place is None or not args or not torch.is_grad_enabled():
            return None
        if isinstance(args[0], PackedSequence) or not isinstance(args[0], Tensor):
            return None
        # A view of what the user gave: a hook on the tensor itself would stay on it.
        x = args[0].view_as(args[0]) if args[0].requires_grad else args[0].detach().clone().requires_grad_(True)
        self.types[place.name] = type(module).__name__
        x.register_hook(self._note_sequence(place.name, module))  # type: ignore[no-untyped-call]
        return (x, *args[1:])

    def _note_sequence(self, name: str, module: nn.Module) -> Callable[[Tensor], None]:
        def note(grad: Tensor) -> None:
            time_first = grad.detach().float()
            if getattr(module, "batch_first", False) and grad.ndim == 3:
                time_first = time_first.transpose(0, 1)
            norms = time_first.flatten(1).norm(dim=1)
            before = self._sequences.get(name)
            is_alike = before is not None and before.shape == norms.shape
            self._sequences[name] = torch.hypot(before, norms) if before is not None and is_alike else norms

        return note

    def _watch_gates(self, module: nn.Module) -> list[Any]:
        """Rows of a recurrent layer's weights belong to its gates, one block each."""
        place = self.names.place(module)
        if place is None:
            return []
        gates = _gates_of(module)
        num, found = len(gates), {"weight": list[Tensor](), "gradient": list[Tensor]()}
        self._gates[place.name] = gates, found
        handles = []
        for name, parameter in module.named_parameters(recurse=False):
            if name.startswith("weight") and "hr" not in name and parameter.requires_grad:
                found["weight"].append(_by_rows(parameter, num))
                note = partial(_add_rows, found["gradient"], num)
                handles.append(parameter.register_hook(note))  # type: ignore[no-untyped-call]
        return handles

    def gates(self) -> dict[str, dict[str, dict[str, float]]]:
        """Layer -> gate -> norm of weight, of gradient, and their ratio."""
        return {name: _gate_numbers(gates, found) for name, (gates, found) in self._gates.items()}

    def called(self, place: Place, module: nn.Module, args: Any, output: Any) -> None:
        """A module that is called once per time step: the gradient of each of its outputs."""
        if _is_recurrent(module):
            return
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
            return
        self.types.setdefault(place.name, type(module).__name__)
        norms = self._calls.setdefault(place.name, [])
        index = len(norms)
        norms.append(None)

        def note(grad: Tensor) -> None:
            norms[index] = grad.detach().norm(dtype=torch.float32)

        tensor.register_hook(note)  # type: ignore[no-untyped-call]

    def profiles(self) -> dict[str, list[float]]:
        repeated = {
            name: [0.0 if norm is None else float(norm) for norm in norms]
            for name, norms in self._calls.items()
            if len(norms) >= self.min_steps or (self.types.get(name, "").endswith("Cell") and len(norms) > 1)
        }
        cells = {name: norms for name, norms in repeated.items() if self.types[name].endswith("Cell")}
        sequences = {name: norms.tolist() for name, norms in self._sequences.items()}
        return {**sequences, **(cells or ({} if self._sequences else repeated))}


def _is_recurrent(module: nn.Module) -> bool:
    return isinstance(module, nn.RNNBase)


def _gates_of(module: nn.Module) -> tuple[str, ...]:
    kind = "LSTM" if isinstance(module, nn.LSTM) else "GRU" if isinstance(module, nn.GRU) else "RNN"
    return GATES[kind]


def _by_rows(tensor: Tensor, num_gates: int) -> Tensor:
    """(gates,) norm of each gate's block of rows."""
    norms: Tensor = tensor.detach().reshape(num_gates, -1).norm(dim=1, dtype=torch.float32)
    return norms


def _add_rows(found: list[Tensor], num_gates: int, grad: Tensor) -> None:
    found.append(_by_rows(grad, num_gates))


def _gate_numbers(names: Sequence[str], found: dict[str, list[Tensor]]) -> dict[str, dict[str, float]]:
    sizes = {
        key: torch.stack(parts).norm(dim=0).tolist() if parts else [0.0] * len(names) for key, parts in found.items()
    }
    return {
        gate: {"weight": w, "gradient": g, "ratio": g / w if w else 0.0}
        for gate, w, g in zip(names, sizes["weight"], sizes["gradient"], strict=True)
    }


def temporal_issues(metrics: TemporalMetrics, types: dict[str, str]) -> list[Issue]:
    """What the profile of a layer says."""
    num_steps, rate, name = len(metrics.profile), metrics.decay_rate, metrics.layer
    if num_steps < MIN_STEPS:
        return []
    found = []
    kind, code = types.get(name, ""), as_code(name)
    if rate < -WARNING and metrics.effective_memory < num_steps:
        found.append(
            Issue(
                type="VANISHING_TEMPORAL",
                severity="CRITICAL" if rate < -CRITICAL else "MEDIUM",
                layer=name,
                message=f"{name}: the gradient keeps {math.exp(rate):.0%} per step back in time",
                recommendation=_longer_memory(kind, code),
                value=rate,
                healthy=f"within ±{WARNING}",
            )
        )
    if rate > WARNING:
        found.append(
            Issue(
                type="EXPLODING_TEMPORAL",
                severity="CRITICAL" if rate > CRITICAL else "MEDIUM",
                layer=name,
                message=f"{name}: the gradient grows {math.exp(rate):.2f}-fold per step back in time",
                recommendation=(
                    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
                    f"nn.init.orthogonal_({code}.weight_hh_l0)  # its largest singular value is then 1"
                ),
                value=rate,
                healthy=f"within ±{WARNING}",
            )
        )
    if metrics.effective_memory < SHORT and num_steps >= 2 * SHORT:
        found.append(
            Issue(
                type="SHORT_MEMORY",
                severity="HIGH",
                layer=name,
                message=f"{name}: only {metrics.effective_memory} of {num_steps} time steps reach the loss",
                recommendation=_longer_memory(kind, code),
                value=float(metrics.effective_memory),
                healthy=f"at least {SHORT}",
            )
        )
    return found


def _longer_memory(kind: str, code: str) -> str:
    if kind == "LSTM":
        return f"h = {code}.hidden_size; {code}.bias_ih_l0.data[h:2 * h] = 2.0  # forget gate open: it remembers longer"
    if kind == "GRU":
        return (
            f"h = {code}.hidden_size; {code}.bias_ih_l0.data[h:2 * h] = 2.0  # update gate: keeps the old state longer"
        )
    return f"{code} = nn.LSTM(…)  # or GRU; else nn.init.orthogonal_({code}.weight_hh_l0)"
