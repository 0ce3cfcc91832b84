"""AttentionAnalyzer: queries, keys and values, heads, the residual stream and the feed-forward parts of a transformer.

Attention is detected by structure: `nn.MultiheadAttention`, three adjacent projections with the usual names, or one
fused projection. The effect of softmax is read from the calls of softmax and scaled_dot_product_attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow.analyzers.attention_blocks import Stream, feed_forward_pairs, feed_forward_ratios
from sonde.flow.analyzers.attention_calls import AttentionCalls
from sonde.flow.analyzers.attention_issues import attention_flow, transformer_issues
from sonde.flow.analyzers.attention_metrics import AttentionMetrics, TransformerMetrics
from sonde.flow.batch import LossFunction
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.fetch import Gathered
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.model_index import Attention, ModelIndex, common_heads
from sonde.flow.trace import Observer, Trace
from sonde.probe.guards import quiet
from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import Layer
from sonde.show.flow.report import FlowReport


class AttentionAnalyzer:
    """An analyzer for transformers.

    report = AttentionAnalyzer(num_heads=8).analyze(model, tokens, labels, loss_fn)
    """

    needs_input_grads: ClassVar = False

    def __init__(
        self, num_heads: int | None = None, *, thresholds: Thresholds = RELATIVE, full_entropy: bool = False
    ) -> None:
        """`num_heads` is read from the model if it says so; otherwise pass it. `full_entropy`: compute the entropy of
        each head from every query of the batch, instead of from at most 32 queries of 2 samples."""
        self.num_heads, self.thresholds, self.full_entropy = num_heads, thresholds, full_entropy
        self.metrics: TransformerMetrics | None = None
        self.report: FlowReport | None = None
        self._watch: _Watch | None = None

    def analyze(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, steps: int = 1
    ) -> FlowReport:
        analyzer, anatomy = FlowAnalyzer(model, thresholds=self.thresholds), ModelIndex(model)
        if not anatomy.attention:
            raise UsageError(
                "no attention found: the model has no nn.MultiheadAttention, no adjacent q/k/v projections and no "
                "fused "
                "qkv projection. For other networks use FlowAnalyzer, or sonde.flow.analyze."
            )
        self.report = analyzer.analyze_with([self], x, y, loss_fn, steps, anatomy=anatomy)
        return self.report

    @contextmanager
    def watching(self, anatomy: ModelIndex) -> Iterator[Sequence[Observer]]:
        heads = HeadGradients(anatomy.attention, self.num_heads)
        num_heads = self.num_heads or common_heads(anatomy.attention)
        with AttentionCalls(anatomy.names, num_heads, is_full=self.full_entropy) as calls:
            self._watch = _Watch(anatomy, heads, calls, Stream(anatomy))
            yield (self._watch.stream.called,)

    def after_pass(self) -> None:
        assert self._watch is not None
        self._watch.ask()

    def conclude(self, traces: list[Trace], layers: Sequence[Layer]) -> tuple[list[Issue], dict[str, Any]]:
        watch, self._watch = self._watch, None
        assert watch is not None
        self.metrics = watch.metrics(traces[0])
        behind_gates = {layer.name for layer in layers if layer.route.region}
        flow = attention_flow(watch.heads.found, traces[0], behind_gates)
        issues = [*transformer_issues(self.metrics), *flow]
        return issues, {"transformer": self.metrics.as_dict()}

    def get_transformer_metrics(self) -> TransformerMetrics:
        if self.metrics is None:
            raise UsageError("nothing to report yet. Call analyze(model, x, y, loss_fn) first.")
        return self.metrics

    def get_layer_metrics(self, layer: str | int) -> AttentionMetrics:
        """The metrics of the attention with that name, or of the n-th."""
        attention = self.get_transformer_metrics().attention
        if isinstance(layer, int):
            return attention[layer]
        for metrics in attention:
            if metrics.layer == layer:
                return metrics
        raise UsageError(f"no attention layer {layer!r}. Available: {', '.join(m.layer for m in attention)}.")

    def get_attention_profile(self) -> dict[str, list[float]]:
        """query, key and value (gradient over weight), and entropy, across layers."""
        attention = self.get_transformer_metrics().attention
        return {key: [getattr(m, key) for m in attention] for key in ("query", "key", "value", "entropy")}


@dataclass(slots=True)
class _Watch:
    """Observes the passes of one analysis."""

    anatomy: ModelIndex
    heads: HeadGradients
    calls: AttentionCalls
    stream: Stream
    pairs: dict[str, tuple[str, str]] = field(default_factory=dict)

    def ask(self) -> None:
        """Everything that needs no numbers yet: while a GPU is still working on the pass, it costs nothing."""
        self.calls.ask()
        self.heads.ask()
        self.stream.ask()
        self.pairs = self.pairs or feed_forward_pairs(self.anatomy)

    def metrics(self, trace: Trace) -> TransformerMetrics:
        for asked in (self.calls, self.heads, self.stream):
            asked.resolve()
        residual, ratios = self.stream.residual(trace), feed_forward_ratios(self.pairs, trace)
        return TransformerMetrics(
            tuple(_metrics(part, self.heads, self.calls) for part in self.heads.found),
            residual,
            ratios,
            {name: self.pairs[name] for name in ratios},
            self.stream.carry([name for name, _ in residual]),
        )


def _metrics(part: Attention, heads: HeadGradients, calls: AttentionCalls) -> AttentionMetrics:
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
        weights=tuple(dict.fromkeys(name for name, *_ in part.parameters.values())),
    )


class HeadGradients:
    """Launched after a pass, all together; becomes numbers when waited for. Of several passes, the last."""

    def __init__(self, found: Sequence[Attention], num_heads: int | None) -> None:
        self.found, self.num_heads = found, num_heads
        self.ratios: dict[tuple[str, str], float] = {}
        self.heads: dict[str, list[float]] = {}
        self._asked: tuple[list[tuple[str, str]], list[str], Gathered] | None = None

    def ask(self) -> None:
        """From the current gradients. Does not wait."""
        keys: list[tuple[str, str]] = []
        tensors: list[Tensor] = []
        by_head: dict[str, Tensor] = {}
        with quiet():
            for part in self.found:
                num = self.num_heads or part.num_heads
                for key, grad, weight in _projections(part):
                    keys.append((part.layer, key))
                    tensors += [grad, weight]
                    if key == "value" and num and grad.shape[0] % num == 0:
                        by_head[part.layer] = grad.reshape(num, -1)
            norms = [*_norms(tensors), *(_norm_of_rows(rows) for rows in by_head.values())]
            self._asked = keys, list(by_head), Gathered(norms)

    def resolve(self) -> None:
        if self._asked is None:
            return
        (keys, layers, gathered), self._asked = self._asked, None
        numbers = gathered.numbers()
        pairs = zip(numbers[: 2 * len(keys) : 2], numbers[1 : 2 * len(keys) : 2], strict=True)
        self.ratios = {
            key: grad / weight if weight else 0.0 for key, ((grad,), (weight,)) in zip(keys, pairs, strict=True)
        }
        self.heads = dict(zip(layers, numbers[2 * len(keys) :], strict=True))


def _projections(part: Attention) -> Iterator[tuple[str, Tensor, Tensor]]:
    """query, key and value with the rows of gradient and weight that belong to each, outputs first."""
    parts: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]] = {}  # a fused projection is split once
    for key, (_, parameter, index, of) in part.parameters.items():
        if not parameter.requires_grad or parameter.grad is None:
            continue
        if id(parameter) not in parts:
            parts[id(parameter)] = _cut(parameter.grad, part, of), _cut(parameter, part, of)
        grads, weights = parts[id(parameter)]
        yield key, grads[index], weights[index]


def _cut(tensor: Tensor | nn.Parameter, part: Attention, of: int) -> Sequence[Tensor]:
    turned = tensor.detach().t() if part.is_transposed and tensor.ndim == 2 else tensor.detach()
    return turned.chunk(of)


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    # In one call: launching them one by one would take longer than computing them.
    if not tensors:
        return ()
    norms: Sequence[Tensor] = torch._foreach_norm(list(tensors), 2, _wide(*tensors))
    return norms


def _norm_of_rows(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=_wide(rows))
    return norms


def _wide(*tensors: Tensor) -> torch.dtype:
    """The dtype for sums of squares: a norm rejects a narrower one than its input's."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
