"""Everything an analysis of gradient flow found, as plain values to ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sonde.errors import UnknownNameError
from sonde.show.flow.issue import PENALTY, SEVERITIES, Issue, IssueSeverity
from sonde.show.flow.metrics import Layer, Status, status_of


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class FlowResult:
    """The layers of a model in the order of its forward pass, each judged, and what is wrong."""

    model_name: str
    loss: float
    layers: tuple[Layer, ...]
    model_issues: tuple[Issue, ...] = ()
    """Issues of the model as a whole."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What an architecture's own analyzer measured: temporal, attention, depth profile."""
    is_relative: bool = True

    def __repr__(self) -> str:
        """One line: the layers of a large model would fill many screens."""
        what = f"{self.model_name}, health {self.health:.0f}/100 {self.status}"
        return f"<FlowReport: {what}, {len(self.layers)} modules, issues: {len(self.issues)}>"

    @property
    def issues(self) -> list[Issue]:
        """Every issue, the gravest first."""
        found = [*self.model_issues, *(issue for layer in self.layers for issue in layer.health.issues)]
        return sorted(found, key=lambda issue: -SEVERITIES.index(issue.severity))

    @property
    def health(self) -> float:
        """The model's score: the mean of the worst tenth of its layers (at least one), less what the whole suffers.

        It judges one batch, as the Gradient Flow Toolkit documents it; `Run.health()` is another score, of a training.
        """
        scores = sorted(layer.health.score for layer in self.layers)
        worst = scores[: max(1, len(scores) // 10)]
        score = sum(worst) / len(worst) if worst else 100.0
        return max(0.0, score - sum(PENALTY[issue.severity] for issue in self.model_issues))

    @property
    def status(self) -> Status:
        return status_of(self.health)

    def layer(self, name: str) -> Layer:
        """The layer of that name; KeyError says which there are."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r}; there are {', '.join(layer.name for layer in self.layers)}")

    def get_worst_layers(self, n: int = 5) -> list[Layer]:
        """The n layers with the lowest score, worst first."""
        return sorted(self.layers, key=lambda layer: (layer.health.score, layer.order))[:n]

    def get_issues_by_severity(self, severity: IssueSeverity) -> list[Issue]:
        """Issues of exactly this severity: LOW, MEDIUM, HIGH or CRITICAL."""
        if severity.upper() not in SEVERITIES:
            raise UnknownNameError("severity", severity, SEVERITIES)
        return [issue for issue in self.issues if issue.severity == severity.upper()]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
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
