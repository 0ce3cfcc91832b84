"""What is wrong with the memory of a recurrent layer, and what opens it."""

from __future__ import annotations

import math
from typing import Final

from sonde.flow.analyzers.temporal_metrics import MIN_STEPS, TemporalMetrics
from sonde.schema.names import as_code
from sonde.show.flow.issue import Issue

WARNING: Final = 0.1
"""Change of the logarithm per time step, either way."""
CRITICAL: Final = 0.3
SHORT: Final = 5


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
                healthy=f"{math.exp(-WARNING):.0%} to {math.exp(WARNING):.0%}",
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
