"""The verdicts that depend on the way of the gradient: gates that open, branches, calls, unused layers, attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sonde.cli.main import main
from sonde.flow import AttentionAnalyzer, FlowReport, analyze
from sonde.reduce.inspect.attention import entropy_by_head, sample_fused


def judge(model: nn.Module, width: int = 32) -> FlowReport:
    torch.manual_seed(1)
    return analyze(model, torch.randn(64, width), torch.randint(4, (64,)), nn.CrossEntropyLoss())


def severe(report: FlowReport) -> list[tuple[str, str]]:
    return [(issue.type, issue.layer) for issue in report.issues if issue.severity in ("HIGH", "CRITICAL")]


class Scaled(nn.Module):
    """A residual branch multiplied by a parameter, or by a constant."""

    def __init__(self, scale: float, learns: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.gamma = nn.Parameter(torch.full((32,), scale)) if learns else scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.down(F.gelu(self.up(self.norm(x))))


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def stacked(*blocks: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 4))


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-4])
def test_a_branch_that_a_weight_close_to_zero_still_closes_is_healthy(scale: float) -> None:
    torch.manual_seed(0)
    report = judge(stacked(*(Scaled(scale) for _ in range(4))))
    assert report.issues == []
    assert report.status == "HEALTHY"


def test_lora_is_healthy_at_its_first_step() -> None:
    torch.manual_seed(0)
    report = judge(stacked(Adapter(), nn.ReLU(), Adapter()))
    assert report.issues == []
    assert report.layer("1.a").route.is_waiting


def test_a_last_layer_at_zero_is_healthy_and_two_are_critical() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.Linear(32, 4, bias=False))
    nn.init.zeros_(model[3].weight)
    assert judge(model).status == "HEALTHY"
    nn.init.zeros_(model[2].weight)
    report = judge(model)
    assert report.status == "CRITICAL"
    assert report.issues[0].message.startswith("none of the")


def test_a_branch_that_a_constant_closes_is_reported() -> None:
    torch.manual_seed(0)
    report = judge(stacked(*(Scaled(1e-6, learns=False) for _ in range(4))))
    assert {issue.type for issue in report.issues} == {"VANISHING"}


class Gated(nn.Module):
    """A mixture of experts: the gate reads what all experts read, and is called last or first."""

    def __init__(self, gate_is_last: bool) -> None:
        super().__init__()
        self.enter, self.gate, self.head = nn.Linear(32, 32), nn.Linear(32, 4), nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.gate_is_last = gate_is_last

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.enter(x))
        weights = None if self.gate_is_last else self.gate(x)
        mixed = torch.stack([expert(x) for expert in self.experts], -1)
        weights = self.gate(x) if weights is None else weights
        return self.head((mixed * (1e-2 * weights).softmax(-1)[:, None]).sum(-1))


@pytest.mark.parametrize("gate_is_last", [True, False])
def test_a_gate_is_not_a_bottleneck_whenever_it_is_called(gate_is_last: bool) -> None:
    torch.manual_seed(0)
    report = judge(Gated(gate_is_last))
    assert "BOTTLENECK" not in {issue.type for issue in report.issues}
    assert report.layer("gate").route.source == ""
    assert report.layer("head").route.used_by == ("",)


class Rectified(nn.Module):
    """Two rectifiers in one line of one module, one of them dead; and one in a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        nn.init.constant_(self.right.bias, -30.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.left(x)) + F.relu(self.right(x)))


def test_dead_units_are_counted_for_each_call() -> None:
    torch.manual_seed(0)
    (issue,) = [issue for issue in judge(Rectified()).issues if issue.layer == "model"]
    assert (issue.type, issue.severity) == ("DEAD", "HIGH")
    assert "after right" in issue.message


class Loop(nn.Module):
    """A recurrence with a rectifier of which every unit is silent at the second step, and only there."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for t in range(4):
            hidden = torch.relu(self.step(hidden + x) - 30 * (t == 1))
        return self.head(hidden)


def test_units_that_are_silent_at_one_time_step_are_not_dead() -> None:
    torch.manual_seed(0)
    assert judge(Loop()).issues == []


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 64), nn.Linear(64, 4)
        self.pooler, self.spare = nn.Linear(64, 8), nn.Linear(8, 8)
        self.mask = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.body(x))
        self.pooler(x)
        return self.head(x)


def test_unused_layers_are_named() -> None:
    torch.manual_seed(0)
    report = judge(Idle())
    (issue,) = report.issues
    assert (issue.type, issue.severity) == ("UNUSED", "LOW")
    assert issue.message.startswith("mask, pooler, spare: did not run")
    assert report.status == "HEALTHY"


class Cut(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.how = nn.Linear(32, 32), nn.Linear(32, 4), how

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(torch.relu(self.body(x)))
        return out.detach() if self.how == "detach" else out


def test_a_network_whose_output_is_detached_is_critical() -> None:
    torch.manual_seed(0)
    report = judge(Cut("detach"))
    assert report.status == "CRITICAL"
    assert ("DEAD", "") in severe(report)


def test_the_command_exits_with_1_for_a_network_without_gradient(tmp_path: Any, capsys: Any) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef build():\n"
        "    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))\n"
        "    for p in model.parameters():\n        nn.init.zeros_(p)\n"
        "    return model, torch.randn(8, 4), torch.zeros(8, 2), lambda out, y: (out * 0).sum()\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["flow", f"{tmp_path}/train.py:build"])
    assert ended.value.code == 1
    assert "CRITICAL DEAD" in capsys.readouterr().out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))
        self.num_heads = 2

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return 3 * q, 3 * k, v

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.project(x)).transpose(1, 2).flatten(2)


def test_the_full_entropy_uses_every_query() -> None:
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(16, 80, 16)
    sampled, full = AttentionAnalyzer(), AttentionAnalyzer(full_entropy=True)
    for analyzer in (sampled, full):
        analyzer.analyze(model, x, None, lambda out: out.square().mean())
    q, k, _ = model.project(x)
    p = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
    wanted = -(p * p.log()).sum(-1).mean((0, 2)) / torch.log(torch.tensor(80.0))
    assert full.get_layer_metrics(0).entropy_by_head == pytest.approx(wanted.tolist(), rel=1e-5)
    assert sampled.get_layer_metrics(0).entropy_by_head != pytest.approx(wanted.tolist(), rel=1e-5)
    sample = sample_fused(q, k, mask=None, is_causal=False, scale=None)
    assert sample.logits.shape[2] < 80
    assert entropy_by_head(sample)[0].shape[-1] == 2
