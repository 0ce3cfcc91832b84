"""TemporalAnalyzer: how much gradient reaches each time step of a recurrent network, and through which gates.

From top to bottom: the analyzer, its metrics of a layer, and issues with the layer's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow.batch import LossFunction
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.model_index import ModelIndex
from sonde.flow.step_gradients import TimeWatch
from sonde.flow.trace import Observer, Trace, foreign_grads_kept
from sonde.probe.compiled import run_eagerly
from sonde.probe.preserve import all_preserved, modules_within
from sonde.schema.names import as_code
from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import Layer
from sonde.show.flow.report import FlowReport

REACH: Final = 0.01
"""A time step counts as remembered while its gradient is above this fraction of the largest."""
MIN_STEPS: Final = 8
WARNING: Final = 0.1
"""Change of the logarithm per time step, either way."""
CRITICAL: Final = 0.3
SHORT: Final = 5
ENOUGH: Final = 0.5
"""A gradient that reaches this fraction of the time steps may shrink on its way."""


class TemporalAnalyzer:
    """For RNN, LSTM, GRU, their cells, and anything that is called once per time step.

    report = TemporalAnalyzer(sequence_length=100).analyze(model, sequences, targets, loss_fn)
    """

    needs_input_grads: ClassVar = True  # to the inputs of recurrent layers

    def __init__(self, sequence_length: int | None = None, *, thresholds: Thresholds = RELATIVE) -> None:
        """`sequence_length`: number of calls after which a custom module counts as called once per time step."""
        self.sequence_length, self.thresholds = sequence_length, thresholds
        self.metrics: dict[str, TemporalMetrics] = {}
        self._watch: TimeWatch | None = None
        self.report: FlowReport | None = None

    def analyze(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, steps: int = 1
    ) -> FlowReport:
        report = FlowAnalyzer(model, thresholds=self.thresholds).analyze_with([self], x, y, loss_fn, steps)
        if not self.metrics:
            raise UsageError(
                "no recurrent layer found: the model has no nn.RNN, LSTM or GRU and no module that is called once "
                "per time "
                "step. For your own loop use analyze_unrolled(cell, inputs, targets, loss_fn)."
            )
        self.report = report
        return report

    @contextmanager
    def watching(self, anatomy: ModelIndex) -> Iterator[Sequence[Observer]]:
        self._watch = watch = TimeWatch(anatomy, self.sequence_length or MIN_STEPS)
        with watch.inputs_with_gradients():
            yield (watch.called,)

    def after_pass(self) -> None:
        """Hooks have already collected everything."""

    def conclude(self, traces: list[Trace], layers: Sequence[Layer]) -> tuple[list[Issue], dict[str, Any]]:
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
        """Unroll `hidden = cell(x_t, hidden)` over inputs (time, batch, …); the loss is computed from the last hidden
        state.

        A cell may return (output, hidden), or an LSTM's (h, c).
        """
        grads: dict[int, float] = {}
        nothing = nn.Identity()
        with torch.enable_grad(), run_eagerly(), all_preserved(nothing, cell), all_preserved(nothing, loss_fn):
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
            own = [parameter for module in modules_within(cell) for parameter in module.parameters()]
            loss = loss_fn(prediction, targets)
            with foreign_grads_kept(loss, own):
                loss.backward()
        self.metrics[name] = TemporalMetrics.of(name, [grads.get(t, 0.0) for t in range(len(inputs))])
        return self.metrics[name]

    def get_temporal_metrics(self) -> dict[str, TemporalMetrics]:
        return dict(self.metrics)

    def get_timestep_profile(self, layer: str | None = None) -> list[float]:
        """Gradient at each time step: of a layer, or of the first one."""
        return list(self._of(layer).profile)

    def get_effective_memory(self, layer: str | None = None) -> dict[str, int] | int:
        """Number of remembered time steps: of one layer, or of each."""
        if layer is not None:
            return self._of(layer).effective_memory
        return {name: metrics.effective_memory for name, metrics in self.metrics.items()}

    def _of(self, layer: str | None) -> TemporalMetrics:
        if not self.metrics:
            raise UsageError("nothing to report yet. Call analyze(model, x, y, loss_fn) first.")
        if layer is None:
            return next(iter(self.metrics.values()))
        if layer not in self.metrics:
            raise UsageError(f"no recurrent layer {layer!r}. Available: {', '.join(self.metrics)}.")
        return self.metrics[layer]


def _is_state(cell: Any, result: tuple[Any, ...]) -> bool:
    """An LSTM cell's (h, c) is one state; (output, hidden) of a custom cell is two values."""
    return isinstance(cell, nn.LSTMCell) or len(result) != 2


def _noter(grads: dict[int, float], t: int) -> Callable[[Tensor], None]:
    def note(grad: Tensor) -> None:
        grads[t] = grads.get(t, 0.0) + float(grad.detach().float().norm())

    return note


@dataclass(frozen=True, slots=True)
class TemporalMetrics:
    """Metrics of one recurrent layer."""

    layer: str
    profile: tuple[float, ...]
    """Norm of the gradient at each time step, first to last."""
    decay_rate: float
    """Change of its logarithm per step back in time: negative if it vanishes, positive if it explodes."""
    effective_memory: int
    """Number of time steps that get more than 1 % of the largest gradient."""
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


def temporal_issues(metrics: TemporalMetrics, types: dict[str, str]) -> list[Issue]:
    """Issues in the profile of a layer. A gradient that shrinks is judged by its reach: a layer as torch initialises it
    reaches eight to ten steps back, which is enough for a short sequence, and too little for a long one."""
    num_steps, rate, name = len(metrics.profile), metrics.decay_rate, metrics.layer
    if num_steps < MIN_STEPS:
        return []
    found = []
    kind, code = types.get(name, ""), as_code(name)
    memory = metrics.effective_memory
    if rate < -WARNING and memory < ENOUGH * num_steps:
        found.append(
            Issue(
                type="VANISHING_TEMPORAL",
                severity="CRITICAL" if rate < -CRITICAL and memory < SHORT else "MEDIUM",
                layer=name,
                message=(
                    f"{name}: the loss reaches {memory} of {num_steps} time steps; the gradient shrinks to "
                    f"{math.exp(rate):.0%} per step back in time"
                ),
                recommendation=_longer_memory(kind, code),
                value=rate,
                healthy=f"{math.exp(-WARNING):.0%} to {math.exp(WARNING):.0%}, or at least {ENOUGH:.0%} of the steps",
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
                healthy=f"{math.exp(-WARNING):.0%} to {math.exp(WARNING):.0%}",
            )
        )
    if memory < SHORT and num_steps >= 2 * SHORT:
        found.append(
            Issue(
                type="SHORT_MEMORY",
                severity="HIGH",
                layer=name,
                message=f"{name}: only {memory} of {num_steps} time steps affect the loss",
                recommendation=_longer_memory(kind, code),
                value=float(memory),
                healthy=f"at least {SHORT}",
            )
        )
    return found


def _longer_memory(kind: str, code: str) -> str:
    if kind == "LSTM":
        return (
            f"h = {code}.hidden_size; {code}.bias_ih_l0.data[h:2 * h] = 2.0  # open the forget gate to remember longer"
        )
    if kind == "GRU":
        return f"h = {code}.hidden_size; {code}.bias_ih_l0.data[h:2 * h] = 2.0  # make the update gate keep its state"
    return f"{code} = nn.LSTM(…)  # or GRU; or else nn.init.orthogonal_({code}.weight_hh_l0)"
