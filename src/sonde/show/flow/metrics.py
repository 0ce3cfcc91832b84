"""Metrics and health of a layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sonde.show.flow.issue import Issue

Status = Literal["HEALTHY", "WARNING", "CRITICAL"]
WORDS: Final = (
    "pressure: gradient size (mean; max: largest; relative: compared with the output). turbulence: how uneven it is. "
    "velocity: how much it changes between micro-batches. grad/weight: change per unit of learning rate."
)
"""The terms of the Gradient Flow Toolkit in plain words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMetrics:
    """Metrics of a layer as plain numbers: its output gradient, parameter gradients and activation."""

    mean_pressure: float
    """Mean magnitude of the gradient at the layer's output."""
    max_pressure: float
    turbulence: float
    """Standard deviation of that magnitude divided by its mean: how uneven it is."""
    velocity: float = 0.0
    """Mean relative change of the pressure between passes; 0 for a single pass."""
    relative_pressure: float
    """Gradient norm divided by that near the output: 1 if nothing is lost or gained. Independent of the loss scale."""
    relative_flow: float = 1.0
    """The same for gradient times activation, which is also independent of the scale of the layer's values."""
    grad_norm: float = 0.0
    """Norm of the gradient at the output."""
    activation_rms: float = 0.0
    activation_zero_fraction: float = 0.0
    silent_units: float = 0.0
    """Fraction of the units of a rectifier that output zero for the whole batch."""
    saturated: float = 0.0
    """Fraction of values at the flat ends of a sigmoid, tanh or clipped activation."""
    weight_norm: float = 0.0
    weight_grad_norm: float = 0.0
    """Norm over all of the layer's own parameters."""
    nonfinite: int = 0
    """Number of NaN and infinite values in output, output gradient and parameter gradients."""
    calls: int = 1

    @property
    def weight_ratio(self) -> float:
        """Gradient norm divided by weight norm: the relative change of the layer per unit of learning rate."""
        return self.weight_grad_norm / self.weight_norm if self.weight_norm else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "weight_ratio": self.weight_ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHealth:
    """A score of at most 100, and the issues that lowered it."""

    score: float
    status: Status
    issues: tuple[Issue, ...] = ()
    recommendations: tuple[str, ...] = ()


WELL: Final = LayerHealth(score=100.0, status="HEALTHY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The way of the gradient from the loss to a layer."""

    is_connected: bool = True
    """Whether the layer's output reaches the loss."""
    is_detached: bool = False
    """Whether it was detached instead."""
    place: int | None = 0
    """Its place among the layers that everything passes on the way to the loss; None for a layer of a branch."""
    is_waiting: bool = False
    """Whether no gradient arrives because a weight on every way is still zero, as a zero initialisation leaves it."""
    region: str = ""
    """The last weight on the way that is close to zero. Layers before one weight are compared with one another."""
    source: str = ""
    """The layer that it gets its input from, if that is a single one and serves no other layer."""
    used_by: tuple[str, ...] = ()
    """The layers that use its output; "" is the loss."""


DIRECT: Final = Route()


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
    """Whether any of the layer's own parameters requires a gradient."""
    route: Route = DIRECT
    silent_where: str = ""
    """The call of a rectifier that has the silent units, if the layer calls several."""

    def judged(self, health: LayerHealth) -> Layer:
        """A copy of the layer with this health. `dataclasses.replace` would take three times as long."""
        return Layer(
            name=self.name, type=self.type, order=self.order, metrics=self.metrics, health=health,
            num_parameters=self.num_parameters, input_shape=self.input_shape, output_shape=self.output_shape,
            is_leaf=self.is_leaf, is_trainable=self.is_trainable, route=self.route, silent_where=self.silent_where,
        )  # fmt: skip


def status_of(score: float) -> Status:
    """The status of a score: above 75 healthy, below 50 critical."""
    return "HEALTHY" if score > 75 else "WARNING" if score >= 50 else "CRITICAL"
