"""The result of a gradient-flow analysis as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sonde.errors import UnknownNameError
from sonde.show.flow.issue import CAP, PENALTY, SEVERITIES, Issue, IssueSeverity
from sonde.show.flow.metrics import Layer, Status, status_of
from sonde.show.term.number import counted


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FlowResult:
    """The layers of a model in the order of its forward pass, with their health and issues."""

    model_name: str
    loss: float
    layers: tuple[Layer, ...]
    model_issues: tuple[Issue, ...] = ()
    """Issues of the whole model."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Results of analyzers for specific architectures: temporal, attention, depth profile."""
    is_relative: bool = True

    def __repr__(self) -> str:
        """A one-line summary: the layers of a large model would fill many screens."""
        what = f"{self.model_name}, health {self.health:.0f}/100 {self.status}"
        return f"<FlowReport: {what}, {counted(len(self.layers), 'module')}, issues: {len(self.issues)}>"

    @property
    def issues(self) -> list[Issue]:
        """Every issue, most severe first."""
        found = [*self.model_issues, *(issue for layer in self.layers for issue in layer.health.issues)]
        return sorted(found, key=lambda issue: -SEVERITIES.index(issue.severity))

    @property
    def health(self) -> float:
        """The model's score: the mean of the worst tenth of its layers (at least one), minus penalties for the model.
        With an issue of severity HIGH it is at most 75, which is not healthy; with a CRITICAL one at most 49.

        It rates one batch, as documented by the Gradient Flow Toolkit; `Run.health()` is a different score for a run.
        """
        scores = sorted(layer.health.score for layer in self.layers)
        worst = scores[: max(1, len(scores) // 10)]
        score = sum(worst) / len(worst) if worst else 100.0
        score -= sum(PENALTY[issue.severity] for issue in self.model_issues)
        return max(0.0, min([score, *(CAP[issue.severity] for issue in self.issues)]))

    @property
    def status(self) -> Status:
        return status_of(self.health)

    def layer(self, name: str) -> Layer:
        """The layer with that name; the KeyError for an unknown name lists all layers."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}. Known: {', '.join(layer.name for layer in self.layers)}")

    def get_worst_layers(self, n: int = 5) -> list[Layer]:
        """The n layers with the lowest score, worst first."""
        return sorted(self.layers, key=lambda layer: (layer.health.score, layer.order))[:n]

    def get_issues_by_severity(self, severity: IssueSeverity) -> list[Issue]:
        """Issues with exactly this severity: LOW, MEDIUM, HIGH or CRITICAL."""
        if severity.upper() not in SEVERITIES:
            raise UnknownNameError("severity", severity, SEVERITIES)
        return [issue for issue in self.issues if issue.severity == severity.upper()]

    def as_dict(self) -> dict[str, Any]:
        """The result as plain values."""
        return {
            "model": self.model_name,
            "loss": self.loss,
            "health": self.health,
            "status": self.status,
            "is_relative": self.is_relative,
            "layers": [
                {
                    "name": layer.name,
                    "type": layer.type,
                    "num_parameters": layer.num_parameters,
                    "output_shape": list(layer.output_shape),
                    "score": layer.health.score,
                    "status": layer.health.status,
                    **layer.metrics.as_dict(),
                }
                for layer in self.layers
            ],
            "issues": [issue.as_dict() for issue in self.issues],
            "details": dict(self.details),
        }
