"""AttentionAnalyzer: queries, keys and values, heads, the residual stream and the feed-forward parts of a transformer.

Attention is found by looking: `nn.MultiheadAttention`, three projections beside one another under their usual names, or
one fused projection. What softmax does is seen through the calls of softmax and scaled_dot_product_attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final, Self

from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow.attention_calls import AttentionCalls
from sonde.flow.batch import LossFunction
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.issue import Issue
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.report import FlowReport
from sonde.flow.trace import Trace
from sonde.probe.model import ModelNames
from sonde.schema.names import as_code

QK_RATIO: Final = 10.0
"""Gradient/weight of queries over keys, or the other way round."""
V_RATIO: Final = 1000.0
"""Values against queries and keys: while attention is even, values rightly get far more."""
RESIDUAL: Final = 0.5
"""Gradient at the first block over that at the last."""
FFN_RATIO: Final = 30.0
"""Gradient/weight of the second feed-forward layer over the first."""
ATTENTION_FLOW: Final = 1e-3
"""Flow into the attention's projections over flow out of it."""
LOW_ENTROPY: Final = 0.1

_TRIPLES: Final = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"), ("q_lin", "k_lin", "v_lin"), ("W_q", "W_k", "W_v"), ("query_proj", "key_proj", "value_proj"),
)  # fmt: skip
_FUSED: Final = ("qkv", "c_attn", "in_proj", "query_key_value", "Wqkv", "qkv_proj", "to_qkv")
_UP: Final = re.compile(r"(^|\.)(fc1|up_proj|gate_proj|c_fc|linear1|lin1|wi|wi_0|dense_h_to_4h|w1|0)$")
_DOWN: Final = re.compile(r"(^|\.)(fc2|down_proj|c_proj|linear2|lin2|wo|dense_4h_to_h|w2|2|3)$")


@dataclass(frozen=True, slots=True)
class AttentionMetrics:
    """Of one attention module."""

    layer: str
    query: float
    """Gradient over weight of the query projection."""
    key: float
    value: float
    head_balance: float = 1.0
    """Smallest over largest gradient of a head's share of the value (or query) projection."""
    entropy: float = math.nan
    """Mean over heads, 1 = attends to everything alike."""
    entropy_by_head: tuple[float, ...] = ()
    logit_max: float = math.nan

    @property
    def imbalance(self) -> float:
        """Largest over smallest of query, key and value."""
        values = [v for v in (self.query, self.key, self.value) if v > 0]
        return max(values) / min(values) if len(values) == 3 else math.inf if values else math.nan


@dataclass(frozen=True, slots=True)
class TransformerMetrics:
    """Of the whole model."""

    attention: tuple[AttentionMetrics, ...]
    residual: tuple[tuple[str, float], ...] = ()
    """Block, and norm of the gradient at its output, from the first to the last."""
    feed_forward: dict[str, float] = field(default_factory=dict)
    """Block -> gradient/weight of its second feed-forward layer over the first."""

    @property
    def residual_ratio(self) -> float:
        """Gradient at the first block over that at the last; 1 in a healthy residual stream."""
        values = [norm for _, norm in self.residual if norm > 0]
        return values[0] / values[-1] if len(values) > 1 else math.nan


class AttentionAnalyzer:
    """For transformers.

    report = AttentionAnalyzer(num_heads=8).analyze(model, tokens, labels, loss_fn)
    """

    def __init__(self, num_heads: int | None = None, *, thresholds: Thresholds = RELATIVE) -> None:
        """`num_heads` is found in the model where it says so; give it where it does not."""
        self.num_heads, self.thresholds = num_heads, thresholds
        self.metrics: TransformerMetrics | None = None
        self.report: FlowReport | None = None

    def analyze(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, steps: int = 1
    ) -> FlowReport:
        analyzer = FlowAnalyzer(model, thresholds=self.thresholds)
        names = ModelNames(model)
        found = find_attention(model, names)
        if not found:
            raise UsageError(
                "no attention was found: no nn.MultiheadAttention, no q/k/v projections beside one another, no fused "
                "qkv projection. For other networks use FlowAnalyzer, or sonde.flow.analyze."
            )
        heads = _HeadGradients(found, self.num_heads)
        with AttentionCalls(names, self.num_heads) as calls, heads:
            traces = analyzer.traces(x, y, loss_fn, steps)
        attention = tuple(_metrics(part, heads, calls) for part in found)
        self.metrics = TransformerMetrics(
            attention, _residual(model, names, traces[0]), _feed_forward(model, names, traces[0])
        )
        issues = [*transformer_issues(self.metrics), *_attention_flow(found, traces[0])]
        self.report = analyzer.report(traces, issues, {"transformer": _plain(self.metrics)})
        return self.report

    def get_transformer_metrics(self) -> TransformerMetrics:
        if self.metrics is None:
            raise UsageError("nothing has been analysed yet. Call analyze(model, x, y, loss_fn) first.")
        return self.metrics

    def get_layer_metrics(self, layer: str | int) -> AttentionMetrics:
        """Of the attention of that name, or of the n-th."""
        attention = self.get_transformer_metrics().attention
        if isinstance(layer, int):
            return attention[layer]
        for metrics in attention:
            if metrics.layer == layer:
                return metrics
        raise UsageError(f"no attention {layer!r}; there are {', '.join(m.layer for m in attention)}.")

    def get_attention_profile(self) -> dict[str, list[float]]:
        """query, key and value (gradient over weight), and entropy, across layers."""
        attention = self.get_transformer_metrics().attention
        return {key: [getattr(m, key) for m in attention] for key in ("query", "key", "value", "entropy")}


def _plain(metrics: TransformerMetrics) -> dict[str, Any]:
    return {**asdict(metrics), "residual_ratio": metrics.residual_ratio}


# -------------------------------------------------------------------------------------------------- finding attention


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module and where its three projections are: parameter names, and the rows that belong to each."""

    layer: str
    module: nn.Module
    parameters: dict[str, tuple[str, nn.Parameter, int, int]]
    """query, key, value -> (name, parameter, which third, of how many)"""
    is_transposed: bool = False
    num_heads: int | None = None


def find_attention(model: nn.Module, names: ModelNames) -> list[Attention]:
    """Every attention in the model, in the order of its modules."""
    found = []
    for module in model.modules():
        place = names.place(module)
        if place is None:
            continue
        parameters = _multihead(module) or _triple(module) or _fused(module)
        if parameters:
            named = {key: (_site(names, p), p, i, n) for key, (p, i, n) in parameters.items()}
            is_conv1d = any(type(child).__name__ == "Conv1D" for child in module.children())
            found.append(Attention(place.name, module, named, is_conv1d, _num_heads(module)))
    return found


def _site(names: ModelNames, parameter: nn.Parameter) -> str:
    named = names.parameter(parameter)
    return named.name if named is not None else ""


_Parts = dict[str, tuple[nn.Parameter, int, int]]


def _multihead(module: nn.Module) -> _Parts | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    keys, joint = ("query", "key", "value"), module._parameters.get("in_proj_weight")
    if joint is not None:
        return {key: (joint, i, 3) for i, key in enumerate(keys)}
    separate = [module._parameters.get(f"{key[0]}_proj_weight") for key in keys]
    return {key: (p, 0, 1) for key, p in zip(keys, separate, strict=True) if p is not None}


def _weight(module: nn.Module | None) -> nn.Parameter | None:
    """A layer's weight, or what it is made from. Not by `.weight`: a spectral norm changes when asked."""
    if module is None:
        return None
    own = module._parameters.get("weight")
    made = module._modules.get("parametrizations")
    if own is None and isinstance(made, nn.ModuleDict) and "weight" in made:
        return made["weight"]._parameters.get("original")
    return own


def _triple(module: nn.Module) -> _Parts | None:
    children = dict(module.named_children())
    for names in _TRIPLES:
        found = [weight for name in names if (weight := _weight(children.get(name))) is not None]
        if len(found) == 3:
            return {key: (weight, 0, 1) for key, weight in zip(("query", "key", "value"), found, strict=True)}
    return None


def _fused(module: nn.Module) -> _Parts | None:
    for name, child in module.named_children():
        weight = _weight(child) if name in _FUSED else None
        if weight is not None and weight.ndim == 2 and max(weight.shape) % 3 == 0:
            return {key: (weight, i, 3) for i, key in enumerate(("query", "key", "value"))}
    return None


def _num_heads(module: nn.Module) -> int | None:
    for name in ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "h"):
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    config = getattr(module, "config", None)
    value = getattr(config, "num_attention_heads", None)
    return value if isinstance(value, int) else None


# ---------------------------------------------------------------------------------------------------------- gradients


class _HeadGradients:
    """Norm of gradient and weight of each projection, and of each head's rows of it, caught as they arrive."""

    def __init__(self, found: Sequence[Attention], num_heads: int | None) -> None:
        self.found, self.num_heads = found, num_heads
        self.ratios: dict[tuple[str, str], float] = {}
        self.heads: dict[str, list[float]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for part in self.found:
            for key, (_, parameter, index, of) in part.parameters.items():
                if parameter.requires_grad:
                    noter = self._noter(part, key, parameter, index, of)
                    self._handles.append(parameter.register_hook(noter))  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _noter(self, part: Attention, key: str, parameter: nn.Parameter, index: int, of: int) -> Any:
        def note(grad: Tensor) -> None:
            own_grad, own = (_rows(t.detach(), index, of, part.is_transposed).float() for t in (grad, parameter))
            weight = float(own.norm())
            self.ratios[part.layer, key] = float(own_grad.norm()) / weight if weight else 0.0
            num = self.num_heads or part.num_heads
            if key == "value" and num and own_grad.shape[0] % num == 0:
                self.heads[part.layer] = [float(head.norm()) for head in own_grad.chunk(num)]

        return note


def _rows(tensor: Tensor, index: int, of: int, is_transposed: bool) -> Tensor:
    """The part of a projection that belongs to query, key or value, outputs first."""
    turned = tensor.t() if is_transposed and tensor.ndim == 2 else tensor
    return turned.chunk(of)[index]


def _metrics(part: Attention, heads: _HeadGradients, calls: AttentionCalls) -> AttentionMetrics:
    by_head = heads.heads.get(part.layer, [])
    seen = calls.of(part.layer)
    query, key, value = (heads.ratios.get((part.layer, name), 0.0) for name in ("query", "key", "value"))
    return AttentionMetrics(
        part.layer,
        query,
        key,
        value,
        head_balance=min(by_head) / max(by_head) if by_head and max(by_head) > 0 else 1.0,
        entropy=fmean(seen.entropy_by_head) if seen else math.nan,
        entropy_by_head=tuple(seen.entropy_by_head) if seen else (),
        logit_max=seen.logit_max if seen else math.nan,
    )


def _residual(model: nn.Module, names: ModelNames, trace: Trace) -> tuple[tuple[str, float], ...]:
    """The longest row of like modules in a list, each giving what it takes: the blocks of the residual stream."""
    best: list[tuple[str, float]] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        found = []
        for block in module:
            place = names.place(block)
            grad = trace.get("actgrad", place.name) if place is not None else None
            if place is not None and grad is not None and block._modules:
                found.append((place.name, grad.norm))
        if len(found) > len(best):
            best = found
    return tuple(best)


def _feed_forward(model: nn.Module, names: ModelNames, trace: Trace) -> dict[str, float]:
    """Pairs of layers that widen and narrow again, by the module that holds them."""
    found: dict[str, float] = {}
    for module in model.modules():
        place = names.place(module)
        children = {name: weight for name, child in module.named_children() if (weight := _weight(child)) is not None}
        wide = next((weight for name, weight in children.items() if _UP.search(name)), None)
        narrow = next((weight for name, weight in children.items() if _DOWN.search(name)), None)
        if place is None or wide is None or narrow is None or wide is narrow:
            continue
        if tuple(wide.shape) != tuple(narrow.shape)[::-1] or wide.shape[0] == wide.shape[-1]:
            continue
        ratios = [_ratio(trace, _site(names, weight)) for weight in (wide, narrow)]
        if all(ratios):
            found[place.name] = ratios[1] / ratios[0]
    return found


def _ratio(trace: Trace, name: str) -> float:
    weight, grad = trace.get("param", name), trace.get("grad", name)
    return grad.norm / weight.norm if weight is not None and grad is not None and weight.norm else 0.0


# -------------------------------------------------------------------------------------------------------------- issues


def transformer_issues(metrics: TransformerMetrics) -> list[Issue]:
    found = [issue for attention in metrics.attention for issue in (*_imbalance(attention), *_collapse(attention))]
    return [*found, *_residual_decay(metrics), *_ffn(metrics)]


def _imbalance(m: AttentionMetrics) -> list[Issue]:
    q, k, v = m.query, m.key, m.value
    if not (q or k or v):
        return []
    qk = max(q, k) / min(q, k) if min(q, k) > 0 else math.inf
    against_v = max(q, k) / v if v > 0 else math.inf
    behind_v = v / max(q, k) if max(q, k) > 0 else math.inf
    if qk <= QK_RATIO and against_v <= QK_RATIO * 10 and behind_v <= V_RATIO:
        return []
    worst = max(qk, against_v, behind_v)
    return [
        Issue(
            type="QKV_IMBALANCE",
            severity="HIGH" if worst > 10 * QK_RATIO else "MEDIUM",
            layer=m.layer,
            message=f"{m.layer}: gradient/weight is {q:.1e} for queries, {k:.1e} for keys, {v:.1e} for values",
            recommendation=(
                f"# initialise the three projections of {as_code(m.layer)} alike (nn.init.xavier_uniform_), or give\n"
                "# the weak one its own parameter group with a larger learning rate; qk-norm keeps them balanced"
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
                f"{m.layer}: head {head} attends to one key only (entropy {m.entropy_by_head[head]:.2f}, "
                f"logits up to {m.logit_max:.0f}): no gradient passes its softmax"
            ),
            recommendation=f"q, k = nn.LayerNorm(head_dim)(q), nn.LayerNorm(head_dim)(k)  # in {m.layer}, before q @ k",
            value=m.entropy_by_head[head],
            healthy=f"above {LOW_ENTROPY}",
        )
    ]


def _attention_flow(found: Sequence[Attention], trace: Trace) -> list[Issue]:
    """Attention whose projections get next to nothing of what leaves it."""
    issues = []
    for part in found:
        out = trace.get("actgrad", part.layer)
        inside = [_ratio(trace, name) for name, *_ in part.parameters.values()]
        others = [
            _ratio(trace, name) for stop in trace.stops.values() for name in stop.parameters if name.endswith("weight")
        ]
        typical = sorted(others)[len(others) // 2] if others else 0.0
        if out is not None and out.norm > 0 and typical > 0 and max(inside) < ATTENTION_FLOW * typical:
            issues.append(
                Issue(
                    type="ATTN_BOTTLENECK",
                    severity="HIGH",
                    layer=part.layer,
                    message=f"{part.layer}: its projections get {max(inside) / typical:.1e} of the typical gradient",
                    recommendation=(
                        f"# is the output of {part.layer} scaled away, or its softmax one-hot? scale = head_dim ** -0.5"
                    ),
                    value=max(inside) / typical,
                    healthy=f"above {ATTENTION_FLOW:g}",
                )
            )
    return issues


def _residual_decay(metrics: TransformerMetrics) -> list[Issue]:
    ratio = metrics.residual_ratio
    if not ratio < RESIDUAL or len(metrics.residual) < 3:
        return []
    first, last = metrics.residual[0][0], metrics.residual[-1][0]
    return [
        Issue(
            type="RESIDUAL_DECAY",
            severity="HIGH" if ratio < RESIDUAL / 10 else "MEDIUM",
            layer="",
            message=f"the residual stream passes {ratio:.1%} of the gradient from {last} back to {first}",
            recommendation="x = x + block(norm(x))  # the skip unscaled, the norm inside the branch (pre-norm)",
            value=ratio,
            healthy=f"above {RESIDUAL}",
        )
    ]


def _ffn(metrics: TransformerMetrics) -> list[Issue]:
    return [
        Issue(
            type="FFN_BOTTLENECK",
            severity="MEDIUM",
            layer=name,
            message=f"{name}: the second layer gets {ratio:.0f} times the gradient/weight of the first",
            recommendation=(
                f"# widen {as_code(name)} or normalise between its layers;\n"
                "# initialise the second with std 0.02 / sqrt(2 * number of blocks)"
            ),
            value=ratio,
            healthy=f"below {FFN_RATIO:g}",
        )
        for name, ratio in metrics.feed_forward.items()
        if ratio > FFN_RATIO
    ]
