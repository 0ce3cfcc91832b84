"""Attentions are sampled as they are called and computed together later: the numbers are those of each by itself."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sonde.flow import AttentionAnalyzer, analyze
from sonde.flow.analyzers import attention_calls
from sonde.probe.model import ModelNames
from sonde.reduce.inspect.units import sampled_skip_gain, skip_gain


class Attention(nn.Module):
    """Of every n-th key; fused, or written out, in which case it spoils its probabilities when it has used them."""

    def __init__(self, num_heads: int, *, every: int = 1, is_causal: bool = False, is_fused: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.num_heads, self.every, self.is_causal, self.is_fused = num_heads, every, is_causal, is_fused

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q_proj(x), self.k_proj(x[:, :: self.every]), self.v_proj(x[:, :: self.every]))
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        if self.is_fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(2)
        p = torch.softmax(q @ k.mT, -1)
        out = p.clone() @ v
        p.data.fill_(0.5)
        return out.transpose(1, 2).flatten(2)


class SideBySide(nn.Module):
    """What they give is added, so that none changes what another sees."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = [part(x) for part in self.parts]
        return torch.stack(outputs).sum(0)


ALIKE = [{"num_heads": 2, "is_causal": True}] * 3
DIFFERENT: list[dict[str, Any]] = [
    {"num_heads": 2}, {"num_heads": 4}, {"num_heads": 2, "is_causal": True}, {"num_heads": 2, "every": 2},
    {"num_heads": 2}, {"num_heads": 4, "is_fused": False}, {"num_heads": 4, "is_fused": False},
]  # fmt: skip


def numbers(*parts: nn.Module) -> list[dict[str, Any]]:
    """Of each attention, all but its name."""
    analyzer = AttentionAnalyzer()
    x = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.linspace(-1, 2, 8)
    analyzer.analyze(SideBySide(*parts), x, None, lambda out: (out * weight).sum())  # linear: each has its own gradient
    named = map(asdict, analyzer.get_transformer_metrics().attention)
    return [{key: value for key, value in one.items() if key not in ("layer", "weights")} for one in named]


@pytest.fixture(params=[ALIKE, DIFFERENT], ids=["alike", "different"])
def parts(request: pytest.FixtureRequest) -> list[Attention]:
    torch.manual_seed(0)
    return [Attention(**options) for options in request.param]


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == {key: pytest.approx(value, rel=1e-6) for key, value in other.items()}


def test_many_attentions_give_what_each_gives_alone(parts: list[Attention]) -> None:
    alone = [one for part in parts for one in numbers(part)]
    assert len({one["entropy"] for one in alone}) == len(parts)  # they can be told apart
    assert all(0 < one["entropy"] < 1 for one in alone)
    assert_close(numbers(*parts), alone)


def test_what_is_too_much_to_hold_is_computed_at_once(parts: list[Attention], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = numbers(*parts)
    num_held: list[int] = []
    stacked = attention_calls._stacked
    monkeypatch.setattr(attention_calls, "_stacked", lambda taken: num_held.append(len(taken)) or stacked(taken))
    monkeypatch.setattr(attention_calls, "MAX_HELD", 0)
    assert_close(numbers(*parts), expected)
    assert num_held == [1] * len(parts)


def test_carry_of_many_blocks_is_that_of_each() -> None:
    torch.manual_seed(0)
    given = torch.randn(3, 20, 6)
    out = given * torch.tensor([1.0, 0.5, 0.1])[:, None, None] + 0.3 * torch.randn(3, 20, 6)
    expected = torch.stack([skip_gain(x, y) for x, y in zip(given, out, strict=True)])
    torch.testing.assert_close(sampled_skip_gain(given, out), expected)


def test_names_are_read_once(zoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ModelNames] = []
    refresh = ModelNames.refresh
    monkeypatch.setattr(ModelNames, "refresh", lambda names: read.append(names) or refresh(names))
    case = zoo("tied_gpt")
    analyze(case.model, case.x, case.y, case.loss_fn, steps=2)
    assert len(read) == 1


def test_attention_in_double_precision() -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).double(), torch.randn(2, 5, 8, dtype=torch.double)
    analyzer = AttentionAnalyzer()
    analyzer.analyze(model, (x, x, x), None, lambda out: out[0].square().sum())
    model(x, x, x)[0].square().sum().backward()
    grad, weight = model.in_proj_weight.grad, model.in_proj_weight
    assert grad is not None
    assert analyzer.get_layer_metrics(0).query == pytest.approx((grad[:8].norm() / weight[:8].norm()).item(), rel=1e-12)
