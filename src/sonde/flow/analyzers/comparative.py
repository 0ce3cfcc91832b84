"""ComparativeAnalyzer: two models, two checkpoints, or one model over its training, layer by layer."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from sonde.errors import UsageError
from sonde.flow.analyzers.automatic import analyze
from sonde.flow.batch import LossFunction
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.show.flow.report import FlowReport

CHANGED: Final = 5.0
"""Points of health a layer must gain or lose to count."""


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One layer, before and after."""

    layer: str
    health_before: float
    health_after: float
    pressure_before: float
    pressure_after: float

    @property
    def health_change(self) -> float:
        return self.health_after - self.health_before

    @property
    def pressure_ratio(self) -> float:
        return self.pressure_after / self.pressure_before if self.pressure_before else float("nan")


@dataclass(frozen=True, slots=True)
class FlowComparison:
    """Two reports side by side. Layers are matched by name."""

    before: FlowReport
    after: FlowReport
    layers: tuple[LayerChange, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def improved(self) -> list[LayerChange]:
        return sorted((c for c in self.layers if c.health_change >= CHANGED), key=lambda c: -c.health_change)

    @property
    def degraded(self) -> list[LayerChange]:
        return sorted((c for c in self.layers if c.health_change <= -CHANGED), key=lambda c: c.health_change)

    @property
    def health_change(self) -> float:
        return self.after.health - self.before.health

    def __str__(self) -> str:
        lines = [f"health {self.before.health:.0f} -> {self.after.health:.0f} ({self.health_change:+.0f})"]
        for title, changes in (("better", self.improved), ("worse", self.degraded)):
            lines += [
                f"  {title:6} {c.layer:30} {c.health_before:3.0f} -> {c.health_after:3.0f}   "
                f"pressure x{c.pressure_ratio:.2g}"
                for c in changes
            ]
        if len(lines) == 1 and self.layers:
            lines.append(self._most_moved())
        for title, names in (("only before", self.only_before), ("only after", self.only_after)):
            if names:
                lines.append(f"  {title}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if names[8:] else ''}")
        return "\n".join(lines)

    def _most_moved(self) -> str:
        """If no layer improved or got worse: the one whose pressure changed most."""
        known = [c for c in self.layers if c.pressure_before > 0 and c.pressure_after > 0]
        if not known:
            return "  no layer improved or got worse"
        most = max(known, key=lambda c: abs(math.log(c.pressure_ratio)))
        return f"  no layer improved or got worse; pressure changed most in {most.layer} (x{most.pressure_ratio:.2g})"

    def print_summary(self) -> None:
        print(self)


class ComparativeAnalyzer:
    """Keeps reports by name and by step, and compares them."""

    def __init__(self, *, thresholds: Thresholds = RELATIVE) -> None:
        self.thresholds = thresholds
        self.reports: dict[str, FlowReport] = {}
        self.history: dict[int, FlowReport] = {}

    def analyze_model(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, name: str = "model"
    ) -> FlowReport:
        """Analyse, and keep the report under a name."""
        report = analyze(model, x, y, loss_fn, thresholds=self.thresholds)
        self.reports[name] = report
        return report

    def compare(self, before: str | FlowReport, after: str | FlowReport) -> FlowComparison:
        """Compare two reports, or two kept ones by name."""
        return compare_reports(self._find(before), self._find(after))

    def compare_models(
        self, before: nn.Module, after: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None
    ) -> FlowComparison:
        """Compare two models on the same batch."""
        first, second = (self.analyze_model(m, x, y, loss_fn, n) for m, n in ((before, "before"), (after, "after")))
        return compare_reports(first, second)

    def compare_checkpoints(
        self,
        model: nn.Module,
        before: str | Path,
        after: str | Path,
        x: Any,
        y: Any = None,
        loss_fn: LossFunction | None = None,
    ) -> FlowComparison:
        """Compare two files of weights for one architecture; the model itself is not changed."""
        reports = []
        for path in (before, after):
            loaded = copy.deepcopy(model)
            _load(loaded, Path(path))
            reports.append(self.analyze_model(loaded, x, y, loss_fn, str(path)))
        return compare_reports(*reports)

    def track_training(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, step: int = 0
    ) -> FlowReport:
        """Analyse the model at this step of its training."""
        report = analyze(model, x, y, loss_fn, thresholds=self.thresholds)
        self.history[step] = report
        return report

    def get_health_evolution(self, layer: str | None = None) -> dict[int, float]:
        """Health by step: of a layer, or of the model."""
        return {
            step: report.health if layer is None else report.layer(layer).health.score
            for step, report in sorted(self.history.items())
        }

    def get_pressure_evolution(self, layer: str) -> dict[int, float]:
        """Mean pressure of a layer by step."""
        return {step: report.layer(layer).metrics.mean_pressure for step, report in sorted(self.history.items())}

    def _find(self, report: str | FlowReport) -> FlowReport:
        if isinstance(report, FlowReport):
            return report
        if report not in self.reports:
            known = ", ".join(self.reports) or "none"
            raise UsageError(f"no report named {report!r}. Available: {known}. Create one with analyze_model(name=…).")
        return self.reports[report]


def compare_reports(before: FlowReport, after: FlowReport) -> FlowComparison:
    """Layers of the same name, side by side."""
    old = {layer.name: layer for layer in before.layers}
    new = {layer.name: layer for layer in after.layers}
    changes = tuple(
        LayerChange(
            name,
            old[name].health.score,
            new[name].health.score,
            old[name].metrics.mean_pressure,
            new[name].metrics.mean_pressure,
        )
        for name in old
        if name in new
    )
    missing, added = (tuple(n for n in a if n not in b) for a, b in ((old, new), (new, old)))
    return FlowComparison(before, after, changes, missing, added)


def _load(model: nn.Module, path: Path) -> None:
    """Weights only: a checkpoint is data, and is never unpickled as code."""
    if not path.exists():
        raise UsageError(f"no checkpoint at {path}.")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state: Any = load_file(path)
    else:
        state = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("model", "state_dict", "model_state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # shapes that differ
        raise UsageError(f"{path.name} does not fit the model: {str(error).splitlines()[-1].strip()}") from error
    if missing or unexpected:
        raise UsageError(
            f"{path.name} does not fit the model: missing {list(missing)[:3]}, unexpected {list(unexpected)[:3]}."
        )
