"""AttentionAnalyzer: queries, keys and values, heads, the residual stream and the feed-forward parts of a transformer.

Attention is found by looking: `nn.MultiheadAttention`, three projections beside one another under their usual names, or
one fused projection. What softmax does is seen through the calls of softmax and scaled_dot_product_attention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow.attention_calls import AttentionCalls
from sonde.flow.attention_find import Attention, common_heads, find_attention, site_of, weight_of
from sonde.flow.attention_issues import attention_flow, transformer_issues
from sonde.flow.attention_metrics import AttentionMetrics, TransformerMetrics
from sonde.flow.batch import LossFunction
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.fetch import fetch
from sonde.flow.issue import Issue
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.report import FlowReport
from sonde.flow.trace import Observer, Trace
from sonde.probe.model import ModelNames, Place
from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.inspect_units import carry

_UP: Final = re.compile(
    r"(^|\.)(fc1|up|up_proj|gate_proj|c_fc|linear1|lin1|wi|wi_0|dense_h_to_4h|w1|0|intermediate\.dense)$"
)
_DOWN: Final = re.compile(r"(^|\.)(fc2|down|down_proj|c_proj|linear2|lin2|wo|dense_4h_to_h|w2|2|3|output\.dense)$")


class AttentionAnalyzer:
    """For transformers.

    report = AttentionAnalyzer(num_heads=8).analyze(model, tokens, labels, loss_fn)
    """

    def __init__(self, num_heads: int | None = None, *, thresholds: Thresholds = RELATIVE) -> None:
        """`num_heads` is found in the model where it says so; give it where it does not."""
        self.num_heads, self.thresholds = num_heads, thresholds
        self.metrics: TransformerMetrics | None = None
        self.report: FlowReport | None = None
        self._seen: tuple[nn.Module, ModelNames, _HeadGradients, AttentionCalls, _Stream] | None = None

    def analyze(
        self, model: nn.Module, x: Any, y: Any = None, loss_fn: LossFunction | None = None, steps: int = 1
    ) -> FlowReport:
        if not find_attention(model, ModelNames(model)):
            raise UsageError(
                "no attention was found: no nn.MultiheadAttention, no q/k/v projections beside one another, no fused "
                "qkv projection. For other networks use FlowAnalyzer, or sonde.flow.analyze."
            )
        self.report = FlowAnalyzer(model, thresholds=self.thresholds).analyze_with([self], x, y, loss_fn, steps)
        return self.report

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[Sequence[Observer]]:
        names = ModelNames(model)
        found = find_attention(model, names)
        num_heads = self.num_heads or common_heads(found)
        with AttentionCalls(names, num_heads) as calls, _HeadGradients(found, self.num_heads) as heads:
            stream = _Stream(model)
            self._seen = model, names, heads, calls, stream
            yield (stream.called,)

    def conclude(self, traces: list[Trace]) -> tuple[list[Issue], dict[str, Any]]:
        assert self._seen is not None
        (model, names, heads, calls, stream), self._seen = self._seen, None
        heads.resolve()
        calls.resolve()
        attention = tuple(_metrics(part, heads, calls) for part in heads.found)
        first = traces[0]
        residual, (ratios, weights) = _residual(model, names, first), _feed_forward(model, names, first)
        carry = stream.carry([name for name, _ in residual])
        self.metrics = TransformerMetrics(attention, residual, ratios, weights, carry)
        issues = [*transformer_issues(self.metrics), *attention_flow(heads.found, first)]
        return issues, {"transformer": _plain(self.metrics)}

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


# ---------------------------------------------------------------------------------------------------------- gradients


class _HeadGradients:
    """Norm of gradient and weight of each projection, and of each head's rows of it, caught as they arrive."""

    def __init__(self, found: Sequence[Attention], num_heads: int | None) -> None:
        self.found, self.num_heads = found, num_heads
        self.ratios: dict[tuple[str, str], float] = {}
        self.heads: dict[str, list[float]] = {}
        self._norms: dict[tuple[str, str], tuple[Tensor, Tensor, Tensor | None]] = {}
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
            own_grad, own = (_rows(t.detach(), index, of, part.is_transposed) for t in (grad, parameter))
            num = self.num_heads or part.num_heads
            by_head = None
            if key == "value" and num and own_grad.shape[0] % num == 0:
                by_head = own_grad.reshape(num, -1).norm(dim=1, dtype=torch.float32)
            # Numbers stay on their device until all are there: waiting for each would stall a GPU at every layer.
            norms = (tensor.norm(dtype=torch.float32) for tensor in (own_grad, own))
            self._norms[part.layer, key] = (*norms, by_head)

        return note

    def resolve(self) -> None:
        norms = iter(fetch([t for three in self._norms.values() for t in three if t is not None]))
        for (layer, key), (*_, by_head) in self._norms.items():
            (grad,), (weight,) = next(norms), next(norms)
            self.ratios[layer, key] = grad / weight if weight else 0.0
            if by_head is not None:
                self.heads[layer] = next(norms)
        self._norms.clear()


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
        weights=tuple(dict.fromkeys(name for name, *_ in part.parameters.values())),
    )


class _Stream:
    """How much of what it takes each block of a list hands on."""

    def __init__(self, model: nn.Module) -> None:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        self._blocks = {id(block) for blocks in lists for block in blocks if block._modules}
        self._shares: dict[str, Tensor] = {}

    def called(self, place: Place, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self._blocks or not args:
            return
        given, out = args[0], output[0] if isinstance(output, tuple) and output else output
        if is_plain_tensor(given) and is_plain_tensor(out) and given.shape == out.shape and given.ndim >= 2:
            self._shares[place.name] = carry(given, out)

    def carry(self, names: Sequence[str]) -> dict[str, float]:
        known = [name for name in names if name in self._shares]
        return {name: share for name, (share,) in zip(known, fetch([self._shares[n] for n in known]), strict=True)}


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


def _layers_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What a module holds, and the two that BERT and its kin wrap once more."""
    yield from module.named_children()
    for wrapper in ("intermediate", "output"):
        inner = module._modules.get(wrapper)
        dense = inner._modules.get("dense") if inner is not None else None
        if dense is not None:
            yield f"{wrapper}.dense", dense


def _feed_forward(
    model: nn.Module, names: ModelNames, trace: Trace
) -> tuple[dict[str, float], dict[str, tuple[str, str]]]:
    """Pairs of layers that widen and narrow again, by the module that holds them: their ratio, and their names."""
    found: dict[str, float] = {}
    weights: dict[str, tuple[str, str]] = {}
    for module in model.modules():
        place = names.place(module)
        children = {name: weight for name, child in _layers_of(module) if (weight := weight_of(child)) is not None}
        wide = next((weight for name, weight in children.items() if _UP.search(name)), None)
        narrow = next((weight for name, weight in children.items() if _DOWN.search(name)), None)
        if place is None or wide is None or narrow is None or wide is narrow:
            continue
        if tuple(wide.shape) != tuple(narrow.shape)[::-1] or wide.shape[0] == wide.shape[-1]:
            continue
        pair = site_of(names, wide), site_of(names, narrow)
        first, second = (trace.weight_ratio(name) for name in pair)
        if first and second:
            found[place.name], weights[place.name] = second / first, pair
    return found, weights
