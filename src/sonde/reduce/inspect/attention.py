"""Attention statistics from its probabilities: entropy, size of the logits, and weight on keys after the query.

From the probabilities if they exist, otherwise recomputed for a sample of queries. Tensors in, 0-d tensors out, on
their device; nothing waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_BATCH: Final = 2
MAX_HEADS: Final = 64
MAX_HEADS_TOLD: Final = 32
"""Maximum number of heads recorded separately; with more, only the mean and the lowest."""
MAX_QUERIES: Final = 32
MAX_ELEMENTS: Final = 1 << 21
MAX_ELEMENTS_ON_HOST: Final = 1 << 15
# Masks are written as -inf, as the lowest number of a dtype, or as -1e9 or -1e4 added to a logit.
MASKED_BELOW: Final = -9_000.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Logits and probabilities (batch, heads, queries, keys) in float32, and the indices of their queries.

    Several attention layers of the same shape may be stacked in front of these dimensions."""

    logits: Tensor
    probabilities: Tensor
    query_step: int
    num_queries: int


@dataclass(frozen=True, slots=True)
class Logits:
    """A sample of queries of a fused attention: the remaining work is the same for all layers of this shape, and can be
    batched."""

    values: Tensor
    """(batch, heads, queries, keys) in float32, scaled and masked, but not yet for causality."""
    query_step: int
    num_queries: int
    is_causal: bool


def _steps(batch: int, heads: int, queries: int, keys: int, device: torch.device) -> tuple[int, int, int]:
    """Strides over batch rows, heads and queries."""
    batch_step, head_step = -(-batch // MAX_BATCH), -(-heads // MAX_HEADS)
    per_query = max(1, -(-batch // batch_step)) * max(1, -(-heads // head_step)) * keys
    budget = MAX_ELEMENTS_ON_HOST if device.type == "cpu" else MAX_ELEMENTS
    wanted = min(MAX_QUERIES, max(4, budget // max(per_query, 1)))
    return batch_step, head_step, -(-queries // wanted)


def _four_dimensional(tensor: Tensor, num_heads: int) -> Tensor:
    """(batch, heads, queries, keys): a merged dimension of batch and heads is split again."""
    if tensor.ndim == 3:
        return tensor.reshape(-1, num_heads, *tensor.shape[1:])
    return tensor if tensor.ndim == 4 else tensor.flatten(0, tensor.ndim - 4)


def sample_explicit(logits: Tensor, probabilities: Tensor, num_heads: int = 1, *, is_full: bool = False) -> Sample:
    """From the input and output of a softmax over the last dimension. `is_full`: all of it."""
    s, p = (_four_dimensional(tensor.detach(), num_heads) for tensor in (logits, probabilities))
    batch, heads, queries = (1, 1, 1) if is_full else _steps(s.shape[0], s.shape[1], s.shape[2], s.shape[3], s.device)
    take = (slice(None, None, batch), slice(None, None, heads), slice(None, None, queries))
    return Sample(s[take].float(), p[take].float(), queries, s.shape[2])


def sample_fused(
    query: Tensor, key: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float | None, num_heads: int = 1
) -> Sample:
    """The probabilities that scaled_dot_product_attention computes internally, for some of its queries."""
    return sample_of(fused_logits(query, key, mask=mask, is_causal=is_causal, scale=scale, num_heads=num_heads))


def fused_logits(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    num_heads: int = 1,
    is_full: bool = False,
) -> Logits:
    """The first half of `sample_fused`: everything that needs the queries and keys themselves. `is_full`: of all."""
    q, k = (_four_dimensional(tensor.detach(), num_heads) for tensor in (query, key))
    num_queries, num_keys = q.shape[2], k.shape[2]
    batch, heads, queries = (1, 1, 1) if is_full else _steps(q.shape[0], q.shape[1], num_queries, num_keys, q.device)
    k = k[::batch]
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    logits = (q[::batch, ::heads, ::queries].float() @ k[:, ::heads].float().transpose(-1, -2)) * factor
    if mask is not None:
        whole = mask.detach().expand(*query.shape[:-1], num_keys)
        logits = _masked(logits, _four_dimensional(whole, num_heads)[::batch, ::heads, ::queries])
    return Logits(logits, queries, num_queries, is_causal)


def sample_of(logits: Logits) -> Sample:
    """The second half: causality, and softmax."""
    s = logits.values
    if logits.is_causal:
        s = s.masked_fill(_after_query(s, logits.query_step), -torch.inf)
    return Sample(s, (s - s.logsumexp(-1, keepdim=True)).exp(), logits.query_step, logits.num_queries)


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.float()


def _after_query(like: Tensor, query_step: int) -> Tensor:
    """(queries, keys) bool: the key comes after the query."""
    queries = torch.arange(like.shape[-2], device=like.device) * query_step
    return torch.arange(like.shape[-1], device=like.device) > queries[:, None]


def entropy_by_head(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """Entropy of each head, 1 = attends equally to every visible key; and logits and probabilities, zero where
    masked."""
    s, p = sample.logits, sample.probabilities
    visible = ~((s <= MASKED_BELOW) & ((p == 0) | p.isnan()))
    p, s = torch.where(visible, p, 0.0), torch.where(visible, s, 0.0)
    num_visible = visible.sum(-1)
    # -sum p log p, with log p = s - log sum exp s: a product instead of a logarithm for every key.
    normaliser = torch.where(visible, sample.logits, -torch.inf).logsumexp(-1)
    entropy = (normaliser - (p * s.where(s.isfinite(), 0.0)).sum(-1)).clamp_min(0.0) / num_visible.clamp_min(
        2
    ).float().log()
    # One visible key leaves no choice: such a row says nothing.
    counted = (num_visible >= 2).float()
    return torch.where(counted > 0, entropy, 0.0).sum((-3, -1)) / counted.sum((-3, -1)), s, p


def attention_numbers(sample: Sample) -> dict[str, Tensor | int]:
    """entropy, entropy_min, entropy_<head>, logit_max, future, queries, keys."""
    per_head, s, p = entropy_by_head(sample)
    found: dict[str, Tensor | int] = {
        "entropy": per_head.mean(),
        "entropy_min": per_head.amin(),
        "logit_max": s.abs().amax(),
        "queries": sample.num_queries,
        "keys": s.shape[-1],
    }
    if 1 < len(per_head) <= MAX_HEADS_TOLD:
        found |= {f"entropy_{head}": entropy for head, entropy in enumerate(per_head.unbind())}
    if sample.num_queries == s.shape[-1]:
        found["future"] = torch.where(_after_query(s, sample.query_step), p, 0.0).sum(-1).mean()
    return found
