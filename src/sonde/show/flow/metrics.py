"""What is measured of a layer, and how well it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sonde.show.flow.issue import Issue

Status = Literal["HEALTHY", "WARNING", "CRITICAL"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMetrics:
    """The gradient that reaches a layer's output, its parameters' gradients, and its activation. Plain numbers."""

    mean_pressure: float
    """Mean magnitude of the gradient at the layer's output."""
    max_pressure: float
    turbulence: float
    """Standard deviation of that magnitude over its mean: how unevenly it is spread."""
    velocity: float = 0.0
    """Mean relative change of the pressure from pass to pass; 0 for one pass."""
    relative_pressure: float
    """Norm of the gradient over that near the output: 1 where nothing is lost or gained, at any scale of the loss."""
    relative_flow: float = 1.0
    """The same of gradient times activation, which does not depend on the scale of the layer's values either."""
    grad_norm: float = 0.0
    """Norm of the gradient at the output."""
    activation_rms: float = 0.0
    activation_zero_fraction: float = 0.0
    silent_units: float = 0.0
    """Share of the units of a rectifier that gave zero for the whole batch."""
    saturated: float = 0.0
    """Share of values at the flat ends of a sigmoid, tanh or clipped activation."""
    weight_norm: float = 0.0
    weight_grad_norm: float = 0.0
    """Of all the layer's own parameters together."""
    nonfinite: int = 0
    """NaN and infinite values in output, output gradient and parameter gradients."""
    calls: int = 1

    @property
    def weight_ratio(self) -> float:
        """Gradient over weight: how much one unit of learning rate would change the layer."""
        return self.weight_grad_norm / self.weight_norm if self.weight_norm else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "weight_ratio": self.weight_ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHealth:
    """A score from 100 down, what lowered it, and what to do."""

    score: float
    status: Status
    issues: tuple[Issue, ...] = ()
    recommendations: tuple[str, ...] = ()


WELL: Final = LayerHealth(score=100.0, status="HEALTHY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One module of the model, in the order of the forward pass."""

    name: str
    type: str
    order: int
    metrics: FlowMetrics
    health: LayerHealth = WELL
    num_parameters: int = 0
    input_shape: tuple[int, ...] = ()
    output_shape: tuple[int, ...] = ()
    is_leaf: bool = True
    is_trainable: bool = True
    """Whether any parameter of its own learns."""

    def judged(self, health: LayerHealth) -> Layer:
        """The same layer with this health. By hand: `dataclasses.replace` takes three times as long."""
        return Layer(
            name=self.name, type=self.type, order=self.order, metrics=self.metrics, health=health,
            num_parameters=self.num_parameters, input_shape=self.input_shape, output_shape=self.output_shape,
            is_leaf=self.is_leaf, is_trainable=self.is_trainable,
        )  # fmt: skip


def status_of(score: float) -> Status:
    """Above 75 healthy, below 50 critical, as documented."""
    return "HEALTHY" if score > 75 else "WARNING" if score >= 50 else "CRITICAL"
