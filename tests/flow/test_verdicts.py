"""What a report may call healthy, and what it must not."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.flow import TemporalAnalyzer, analyze


def batch(width: int = 32, size: int = 64) -> tuple[Tensor, Tensor, Any]:
    torch.manual_seed(0)
    return torch.randn(size, width), torch.randint(4, (size,)), nn.CrossEntropyLoss()


def kinds(report: Any) -> set[tuple[str, str]]:
    return {(issue.type, issue.layer) for issue in report.issues}


class Compressing(nn.Module):
    def __init__(self, narrow: int) -> None:
        super().__init__()
        self.enter, self.down, self.head = nn.Linear(64, 64), nn.Linear(64, narrow), nn.Linear(narrow, 4)
        with torch.no_grad():
            self.down.weight *= 20

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.relu(self.enter(x)))))


def test_four_to_one_compresses() -> None:
    assert ("BOTTLENECK", "down") in kinds(analyze(Compressing(16), *batch(64)))
    assert ("BOTTLENECK", "down") not in kinds(analyze(Compressing(17), *batch(64)))


class FeedForward(nn.Module):
    """A transformer's block with a small first or second feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attn(h, h, h)[0]
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))


@pytest.mark.parametrize("small", ["fc1", "fc2"])
def test_either_layer_of_a_feed_forward_part_may_be_the_bottleneck(small: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), FeedForward())
    x = torch.randn(4, 8, 32)
    assert ("FFN_BOTTLENECK", "0") not in kinds(analyze(model, x, None, lambda out: out.square().mean()))
    with torch.no_grad():
        getattr(model[0], small).weight *= 0.005
    found = [i for i in analyze(model, x, None, lambda out: out.square().mean()).issues if i.type == "FFN_BOTTLENECK"]
    assert [issue.layer for issue in found] == ["0"]
    assert f"the {'first' if small == 'fc1' else 'second'} layer gets" in found[0].message


def test_no_severe_issue_drowns_in_the_mean_of_many_layers() -> None:
    torch.manual_seed(0)
    blocks = [part for _ in range(20) for part in (nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())]
    model = nn.Sequential(*blocks, nn.Linear(32, 4))
    model[1].bias.data.fill_(-30.0)  # every unit of one ReLU is dead
    model[3].bias.data.normal_()
    report = analyze(model, *batch())
    assert report.get_issues_by_severity("HIGH")
    assert report.status != "HEALTHY"


class Last(nn.Module):
    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn, self.head = rnn, nn.Linear(rnn.hidden_size, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize(("length", "severities"), [(12, []), (60, ["MEDIUM"])])
def test_a_default_recurrent_layer_is_judged_by_its_reach(kind: Any, length: int, severities: list[str]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(16, length, 8), torch.randint(4, (16,))
    report = analyze(Last(kind(8, 32, batch_first=True)), x, y, nn.CrossEntropyLoss())
    assert [issue.severity for issue in report.issues if issue.type == "VANISHING_TEMPORAL"] == severities
    assert [issue for issue in report.issues if issue.severity in ("HIGH", "CRITICAL")] == []


def test_a_layer_that_forgets_within_five_steps_is_still_critical() -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(8, 32, batch_first=True)
    nn.init.orthogonal_(rnn.weight_hh_l0, gain=0.2)
    report = analyze(Last(rnn), torch.randn(16, 30, 8), torch.randint(4, (16,)), nn.CrossEntropyLoss())
    assert "VANISHING_TEMPORAL" in {issue.type for issue in report.get_issues_by_severity("CRITICAL")}


class Counting(nn.Module):
    """A cell with everything that a step may change: a counter, a running mean, dropout, a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.norm, self.drop = nn.GRUCell(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.num_steps = 0

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        self.num_steps += 1
        return self.drop(self.norm(self.cell(x, hidden)))


@pytest.mark.parametrize("wrap", [lambda cell: cell, lambda cell: lambda x, hidden: cell(x, hidden)])
def test_unrolling_leaves_the_cell_untouched(wrap: Any) -> None:
    torch.manual_seed(0)
    cell, inputs, targets = Counting(), torch.randn(12, 4, 3), torch.randn(4, 3)
    for parameter in cell.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, random = copy.deepcopy(cell), torch.get_rng_state()
    hidden = torch.zeros(4, 3, requires_grad=True)
    metrics = TemporalAnalyzer().analyze_unrolled(wrap(cell), inputs, targets, nn.MSELoss(), hidden)
    assert metrics.profile[-1] > 0
    assert math.isfinite(metrics.decay_rate)
    assert cell.num_steps == 0
    assert all(torch.equal(a, b) for a, b in zip(cell.state_dict().values(), before.state_dict().values(), strict=True))
    assert all((parameter.grad == 1).all() for parameter in cell.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert hidden.grad is None


def test_a_list_of_blocks_may_hold_none() -> None:
    """Informer's list of downsampling layers has an entry that is None."""

    class Gaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)), None, nn.Sequential(nn.Linear(8, 8))])

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(x, x, x)[0]
            for block in self.blocks:
                x = x if block is None else x + block(x)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    report = analyze(Gaps(), torch.randn(16, 5, 8), torch.randint(4, (16,)), nn.CrossEntropyLoss())
    assert report.layer("blocks.2.0").metrics.grad_norm > 0
