"""Numbers leave a device together, and a row of sums becomes the few that an analysis needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sonde.flow import AttentionAnalyzer
from sonde.flow.fetch import fetch
from sonde.flow.sketch import Sketch, sketches_of
from sonde.reduce.numpy import sketch
from sonde.schema.sketch import empty_rows


def test_numbers_come_back_in_the_order_they_were_asked_for() -> None:
    tensors = [torch.tensor(1.5), torch.tensor([2, 3]), torch.tensor([4.0, 5.0]), torch.tensor(6.0, dtype=torch.double)]
    assert fetch(tensors) == [[1.5], [2.0, 3.0], [4.0, 5.0], [6.0]]
    assert fetch([]) == []


def test_a_sketch_counts_nonfinite_values_and_leaves_them_out() -> None:
    values = np.array([3.0, -4.0, 0.0, np.nan, np.inf])
    (found,) = sketches_of(sketch(values).rows[None])
    assert found == Sketch(5, 7 / 3, 4.0, 5.0, math.sqrt(25 / 3), 0.2, 2)


def test_a_sketch_of_nothing_finite_and_one_of_nothing() -> None:
    nothing_finite, nothing = sketches_of(np.stack([sketch(np.array([np.nan, np.inf])).rows, empty_rows()]))
    assert nothing_finite == Sketch(2, 0.0, 0.0, 0.0, 0.0, 0.0, 2)
    assert nothing == Sketch(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))


@pytest.mark.parametrize("part", ["fused_logits", "entropy_by_head"])
def test_unreadable_attention_is_reported_and_the_rest_analysed(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("of a kind unknown")

    monkeypatch.setattr(f"sonde.flow.analyzers.attention_calls.{part}", fails)
    analyzer = AttentionAnalyzer()
    report = analyzer.analyze(OneHead(), torch.randn(2, 3, 4), None, lambda out: out.square().mean())
    assert "cannot inspect an attention layer (RuntimeError: of a kind unknown)" in capsys.readouterr().err
    assert report.layer("q_proj").metrics.grad_norm > 0
    assert math.isnan(analyzer.get_layer_metrics(0).entropy)
