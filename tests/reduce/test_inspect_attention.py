"""Attention's numbers against loops, and the three ways to compute attention against one another."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sonde.reduce.inspect.attention import attention_numbers, sample_explicit, sample_fused

B, H, T, D = 2, 3, 9, 4


def tensors(num_keys: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(B, H, T, D, generator=generator), torch.randn(B, H, num_keys, D, generator=generator)


def logits_of(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = q @ k.transpose(-1, -2) / math.sqrt(D)
    return logits if mask is None else logits.masked_fill(~mask, -torch.inf)


def reference(logits: Tensor) -> dict[str, float]:
    """Head by head, query by query."""
    heads: list[list[float]] = [[] for _ in range(logits.shape[1])]
    future, largest = [], 0.0
    for b in range(logits.shape[0]):
        for h in range(logits.shape[1]):
            for i in range(logits.shape[2]):
                row = logits[b, h, i]
                p = row.softmax(-1)
                seen = row[row > -9000]
                largest = max(largest, float(seen.abs().max()))
                if len(seen) > 1:
                    heads[h].append(float(-sum(x * math.log(x) for x in p.tolist() if x > 0)) / math.log(len(seen)))
                future.append(float(p[i + 1 :].sum()))
    means = [sum(head) / len(head) for head in heads]
    return {
        "entropy": sum(means) / len(means),
        "entropy_min": min(means),
        **{f"entropy_{head}": mean for head, mean in enumerate(means)},
        "logit_max": largest,
        "future": sum(future) / len(future),
    }


def numbers(sample) -> dict[str, float]:
    return {name: float(value) for name, value in attention_numbers(sample).items()}


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


@pytest.mark.parametrize("is_causal", [False, True])
def test_against_loops(is_causal):
    q, k = tensors()
    logits = logits_of(q, k, CAUSAL if is_causal else None)
    found = numbers(sample_explicit(logits, logits.softmax(-1)))
    for name, value in reference(logits).items():
        assert found[name] == pytest.approx(value, abs=1e-5), name
    assert (found["queries"], found["keys"]) == (T, T)
    assert (found["future"] == 0) == is_causal


@pytest.mark.parametrize("is_causal", [False, True])
def test_fused_is_explicit(is_causal):
    q, k = tensors()
    logits = logits_of(q, k, CAUSAL if is_causal else None)
    expected = numbers(sample_explicit(logits, logits.softmax(-1)))
    found = numbers(sample_fused(q, k, mask=None, is_causal=is_causal, scale=None))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("hidden", [-torch.inf, -1e9, -1e4, torch.finfo(torch.float32).min])
def test_every_way_to_write_a_mask_is_a_mask(hidden):
    q, k = tensors()
    additive = torch.zeros(T, T).masked_fill(~CAUSAL, hidden)
    expected = reference(logits_of(q, k, CAUSAL))
    fused = numbers(sample_fused(q, k, mask=additive, is_causal=False, scale=None))
    logits = logits_of(q, k) + additive
    explicit = numbers(sample_explicit(logits, logits.softmax(-1)))
    for found in (fused, explicit):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, abs=1e-5), name


def test_boolean_mask_with_rows_that_see_nothing():
    q, k = tensors()
    mask = CAUSAL.clone()
    mask[4] = False
    found = numbers(sample_fused(q, k, mask=mask, is_causal=False, scale=None))
    assert all(math.isfinite(value) for value in found.values())


def test_grouped_keys_and_other_lengths():
    q, k = tensors(num_keys=5)
    found = numbers(sample_fused(q, k[:, :1], mask=None, is_causal=False, scale=0.3))
    logits = (q @ k[:, :1].expand(B, H, 5, D).transpose(-1, -2)) * 0.3
    assert found["entropy"] == pytest.approx(reference(logits)["entropy"], abs=1e-5)
    assert "future" not in found
    assert (found["queries"], found["keys"]) == (T, 5)


def test_heads_laid_out_with_the_batch():
    q, k = tensors()
    logits = logits_of(q, k)
    flat = logits.flatten(0, 1)
    expected = numbers(sample_explicit(logits, logits.softmax(-1)))
    assert numbers(sample_explicit(flat, flat.softmax(-1), num_heads=H)) == pytest.approx(expected, abs=1e-6)


def test_a_head_that_looks_at_one_key_has_entropy_zero():
    logits = torch.zeros(1, 2, 4, 4)
    logits[0, 1, :, 0] = 200.0
    found = numbers(sample_explicit(logits, logits.softmax(-1)))
    assert found["entropy_min"] == pytest.approx(0, abs=1e-6)
    assert found["entropy"] == pytest.approx(0.5, abs=1e-6)
    assert found["logit_max"] == 200


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_nonfinite_logit_is_not_recorded_as_a_small_one(odd):
    q, k = tensors()
    logits = logits_of(q, k, torch.ones(T, T, dtype=torch.bool).tril())
    logits[0, 1, 4, 2] = odd
    found = numbers(sample_explicit(logits, logits.softmax(-1)))
    assert found["logit_max"] == pytest.approx(odd, nan_ok=True)


def test_long_sequences_are_sampled_and_stay_causal():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 2, 700, 8, generator=generator) for _ in range(2))
    sample = sample_fused(q, k, mask=None, is_causal=True, scale=None)
    assert sample.logits.shape[2] <= 64
    assert numbers(sample)["future"] == 0
    assert numbers(sample)["queries"] == 700
