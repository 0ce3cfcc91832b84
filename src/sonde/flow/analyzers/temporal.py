"""TemporalAnalyzer: how much gradient reaches each time step of a recurrent network, and through which gates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow.analyzers.temporal_issues import temporal_issues
from sonde.flow.analyzers.temporal_metrics import MIN_STEPS, TemporalMetrics
from sonde.flow.batch import LossFunction
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.model_index import ModelIndex
from sonde.flow.step_gradients import TimeWatch
from sonde.flow.trace import Observer, Trace
from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import Layer
from sonde.show.flow.report import FlowReport


class TemporalAnalyzer:
    """For RNN, LSTM, GRU, their cells, and anything that is called once per time step.

    report = TemporalAnalyzer(sequence_length=100).analyze(model, sequences, targets, loss_fn)
    """

    needs_input_grads: ClassVar = True  # to the inputs of recurrent layers

    def __init__(self, sequence_length: int | None = None, *, thresholds: Thresholds = RELATIVE) -> None:
        """`sequence_length`: a module of one's own that is called so often is taken to be called once per time step."""
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
                "no recurrent layer was found: no nn.RNN, LSTM or GRU, no module that is called once per time step. "
                "For a loop of one's own use analyze_unrolled(cell, inputs, targets, loss_fn)."
            )
        self.report = report
        return report

    @contextmanager
    def watching(self, anatomy: ModelIndex) -> Iterator[Sequence[Observer]]:
        self._watch = watch = TimeWatch(anatomy, self.sequence_length or MIN_STEPS)
        with watch.inputs_with_gradients():
            yield (watch.called,)

    def after_pass(self) -> None:
        """What a hook catches is there already."""

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
