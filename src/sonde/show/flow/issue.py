"""Issues of gradient flow: their kinds, and one issue with its recommendation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sonde.diagnose.finding import Severity

IssueType = Literal[
    "VANISHING", "EXPLODING", "BOTTLENECK", "DECAY", "VANISHING_TEMPORAL", "EXPLODING_TEMPORAL", "SHORT_MEMORY",
    "ATTN_BOTTLENECK", "FFN_BOTTLENECK", "QKV_IMBALANCE", "RESIDUAL_DECAY", "LAYER_VARIANCE", "DEAD", "SATURATED",
    "NUMERICAL", "UNUSED", "RANK_COLLAPSE", "SYMMETRIC",
]  # fmt: skip
IssueSeverity = Literal["LOW", "MEDIUM", "HIGH", "CRITICAL"]

SEVERITIES: Final[tuple[IssueSeverity, ...]] = ("LOW", "MEDIUM", "HIGH", "CRITICAL")
"""Severities of the Gradient Flow Toolkit, which its users compare with; elsewhere a severity is a `Severity`."""
LEVELS: Final[dict[IssueSeverity, Severity]] = {
    "LOW": Severity.INFO, "MEDIUM": Severity.WARNING, "HIGH": Severity.WARNING, "CRITICAL": Severity.CRITICAL,
}  # fmt: skip
PENALTY: Final[dict[IssueSeverity, float]] = {"LOW": 10.0, "MEDIUM": 25.0, "HIGH": 35.0, "CRITICAL": 60.0}
"""Points that an issue subtracts from a score of 100."""
CAP: Final[dict[IssueSeverity, float]] = {"LOW": 100.0, "MEDIUM": 100.0, "HIGH": 75.0, "CRITICAL": 49.0}
"""The highest score of a model with such an issue: one severe issue must not drown in the mean of many layers."""
MEANINGS: Final[dict[IssueType, str]] = {
    "VANISHING": "Gradients too small to learn from, compared with the rest of the model.",
    "EXPLODING": "Gradients far larger than in the rest of the model.",
    "BOTTLENECK": "A compressing layer that amplifies gradients.",
    "DECAY": "Gradients shrink layer by layer towards the input.",
    "VANISHING_TEMPORAL": "Gradients vanish on their way back through time.",
    "EXPLODING_TEMPORAL": "Gradients explode on their way back through time.",
    "SHORT_MEMORY": "Only the last few time steps affect the loss.",
    "ATTN_BOTTLENECK": "Attention passes on far less gradient than its neighbours.",
    "FFN_BOTTLENECK": "The feed-forward part narrows or amplifies the gradient.",
    "QKV_IMBALANCE": "Query, key and value receive gradients of very different size.",
    "RESIDUAL_DECAY": "The residual stream loses gradient from block to block.",
    "LAYER_VARIANCE": "Gradients of similar layers differ widely.",
    "DEAD": "Units that output zero for every input, or layers without any gradient.",
    "SATURATED": "Units at the flat ends of their activation.",
    "NUMERICAL": "NaN or infinity.",
    "UNUSED": "Layers that do not run, or whose output does not affect the loss.",
    "RANK_COLLAPSE": "The outputs of different samples or tokens become nearly the same.",
    "SYMMETRIC": "Units with equal weights and equal gradients, which stay copies of one another.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """One issue, its layer, and the change that fixes it."""

    type: IssueType
    severity: IssueSeverity
    layer: str
    """The module it was found in; "" for the model as a whole."""
    message: str
    recommendation: str = ""
    """The recommended change, as code for this layer."""
    value: float | None = None
    healthy: str = ""

    @property
    def level(self) -> Severity:
        """The severity as used by findings."""
        return LEVELS[self.severity]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
