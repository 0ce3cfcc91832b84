"""Issues of a transformer: unbalanced projections, one-hot attention, a weak residual stream."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from statistics import median
from typing import Final

from sonde.flow.analyzers.attention_metrics import AttentionMetrics, TransformerMetrics
from sonde.flow.model_index import Attention
from sonde.flow.trace import Trace
from sonde.schema.names import as_code
from sonde.show.flow.issue import Issue

QK_RATIO: Final = 30.0
"""Gradient/weight of queries over keys, or the other way round."""
V_RATIO: Final = 1000.0
"""Values against queries and keys: while attention is uniform, values rightly get far more."""
RESIDUAL: Final = 0.5
"""Gradient at the first block over that at the last."""
CARRY: Final = 0.35
"""How much of its input a block passes on, in the median: 1 with a skip, 0.5 with a norm after it, else 0."""
FFN_RATIO: Final = 30.0
"""Gradient/weight of the second feed-forward layer over the first, or the other way round."""
ATTENTION_FLOW: Final = 1e-3
"""Flow into the attention's projections over flow out of it."""
LOW_ENTROPY: Final = 0.1
UNIFORM: Final = 0.95
"""From this mean entropy on, attention is nearly uniform."""


def transformer_issues(metrics: TransformerMetrics) -> list[Issue]:
    found = [issue for attention in metrics.attention for issue in (*_imbalance(attention), *_collapse(attention))]
    return [*found, *_residual_decay(metrics), *_ffn(metrics)]


def _imbalance(m: AttentionMetrics) -> list[Issue]:
    q, k, v = m.query, m.key, m.value
    if not (q or k or v):
        return []
    qk = max(q, k) / min(q, k) if min(q, k) > 0 else math.inf if max(q, k) > 0 else 0.0
    against_v = max(q, k) / v if v > 0 else math.inf
    # While attention is uniform, as at initialisation, queries and keys rightly get next to nothing.
    behind_v = (v / max(q, k) if max(q, k) > 0 else math.inf) if m.entropy < UNIFORM else 0.0
    if qk <= QK_RATIO and against_v <= QK_RATIO * 10 and behind_v <= V_RATIO:
        return []
    worst = max(qk, against_v, behind_v)
    return [
        Issue(
            type="QKV_IMBALANCE",
            severity="HIGH" if worst > 10 * QK_RATIO else "MEDIUM",
            layer=m.layer,
            message=f"{m.layer}: gradient/weight is {q:.1e} for queries, {k:.1e} for keys, {v:.1e} for values",
            recommendation="\n".join(
                [
                    *(f"nn.init.xavier_uniform_({as_code(name)})" for name in m.weights),
                    f"q, k = nn.RMSNorm(q.shape[-1])(q), nn.RMSNorm(k.shape[-1])(k)  # in {m.layer}: balance them",
                ]
            ),
            value=worst,
            healthy=f"below {QK_RATIO:g} between queries and keys",
        )
    ]


def _collapse(m: AttentionMetrics) -> list[Issue]:
    if not m.entropy_by_head or min(m.entropy_by_head) >= LOW_ENTROPY or not m.logit_max > 50:
        return []
    head = m.entropy_by_head.index(min(m.entropy_by_head))
    return [
        Issue(
            type="ATTN_BOTTLENECK",
            severity="HIGH",
            layer=m.layer,
            message=(
                f"{m.layer}: head {head} attends to a single key (entropy {m.entropy_by_head[head]:.2f}, "
                f"logits up to {m.logit_max:.0f}): no gradient passes its softmax"
            ),
            recommendation=f"q, k = nn.LayerNorm(head_dim)(q), nn.LayerNorm(head_dim)(k)  # in {m.layer}, before q @ k",
            value=m.entropy_by_head[head],
            healthy=f"above {LOW_ENTROPY}",
        )
    ]


def attention_flow(found: Sequence[Attention], trace: Trace, behind_gates: Container[str]) -> list[Issue]:
    """Attention whose projections get next to nothing of the gradient at its output. Not if a weight that is
    still close to zero follows."""
    issues = []
    projections = {name for part in found for name, *_ in part.parameters.values()}
    others = [
        trace.weight_ratio(name)
        for stop in trace.stops.values()
        for name in stop.parameters
        if name.endswith("weight") and name not in projections
    ]
    typical = sorted(others)[len(others) // 2] if others else 0.0
    for part in found:
        if any(name.rpartition(".")[0] in behind_gates for name, *_ in part.parameters.values()):
            continue
        out = trace.get("actgrad", part.layer)
        inside = [trace.weight_ratio(name) for name, *_ in part.parameters.values()]
        if out is not None and out.norm > 0 and typical > 0 and 0 < max(inside) < ATTENTION_FLOW * typical:
            issues.append(
                Issue(
                    type="ATTN_BOTTLENECK",
                    severity="HIGH",
                    layer=part.layer,
                    message=f"{part.layer}: its projections get {max(inside) / typical:.1e} times the typical gradient",
                    recommendation=(
                        f"x = x + {as_code(part.layer)}(x)  # do not scale its output down\n"
                        "logits = q @ k.mT * q.shape[-1] ** -0.5  # and keep its softmax from becoming one-hot"
                    ),
                    value=max(inside) / typical,
                    healthy=f"above {ATTENTION_FLOW:g}",
                )
            )
    return issues


def _residual_decay(metrics: TransformerMetrics) -> list[Issue]:
    """Either the gradient is lost on the way, or a norm compensates for a skip that is weak in the forward pass."""
    if len(metrics.residual) < 3:
        return []
    ratio, first, last = metrics.residual_ratio, metrics.residual[0][0], metrics.residual[-1][0]
    share = median(metrics.carry.values()) if metrics.carry else 1.0
    if ratio < RESIDUAL:
        value, healthy, is_grave = ratio, RESIDUAL, ratio < RESIDUAL / 10
        message = f"the residual stream passes {ratio:.1%} of the gradient from {last} back to {first}"
    elif share < CARRY:
        value, healthy, is_grave = share, CARRY, share < CARRY / 2
        message = (
            f"blocks from {first} to {last} pass on {share:.0%} of their input: the skip connection is weak or missing"
        )
    else:
        return []
    return [
        Issue(
            type="RESIDUAL_DECAY",
            severity="HIGH" if is_grave else "MEDIUM",
            layer="",
            message=message,
            recommendation="x = x + block(norm(x))  # keep the skip unscaled and the norm inside the branch (pre-norm)",
            value=value,
            healthy=f"above {healthy}",
        )
    ]


def _ffn(metrics: TransformerMetrics) -> list[Issue]:
    return [
        Issue(
            type="FFN_BOTTLENECK",
            severity="MEDIUM",
            layer=name,
            message=(
                f"{name}: the {'second' if ratio > 1 else 'first'} layer gets {max(ratio, 1 / ratio):.0f} times the "
                f"gradient/weight of the {'first' if ratio > 1 else 'second'}"
            ),
            recommendation="\n".join(
                f"nn.init.xavier_uniform_({as_code(weight)})" for weight in metrics.feed_forward_weights.get(name, ())
            )
            + f"  # in {name}: initialise both at the same scale, or add a norm between them",
            value=ratio,
            healthy=f"{1 / FFN_RATIO:.2g} to {FFN_RATIO:g}",
        )
        for name, ratio in metrics.feed_forward.items()
        if not 1 / FFN_RATIO <= ratio <= FFN_RATIO
    ]
