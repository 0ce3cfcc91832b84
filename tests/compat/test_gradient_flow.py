"""The snippets of the Gradient Flow Toolkit run with only the import changed, and every name it documents exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sonde.compat import gradient_flow as compat

NAMES = """
GradientScale gradient_scale FlowAnalyzer FlowMetrics LayerHealth HookManager BackwardHook ForwardHook StandardAnalyzer
TemporalAnalyzer AttentionAnalyzer ComparativeAnalyzer FlowReport ConsoleReporter HTMLReportGenerator
"""
METHODS = {
    "StandardAnalyzer": "analyze get_layer_type_stats get_depth_profile",
    "TemporalAnalyzer": "analyze analyze_unrolled get_temporal_metrics get_timestep_profile get_effective_memory",
    "AttentionAnalyzer": "analyze get_transformer_metrics get_layer_metrics get_attention_profile",
    "ComparativeAnalyzer": (
        "analyze_model compare compare_models compare_checkpoints track_training get_health_evolution "
        "get_pressure_evolution"
    ),
    "FlowReport": (
        "print_summary print_issues print_layers save_html save_json save_text get_worst_layers get_issues_by_severity"
    ),
    "ConsoleReporter": "format_report print_summary print_layer_summary print_issues print_recommendations",
    "HTMLReportGenerator": "generate",
}
METRICS = {"FlowMetrics": "mean_pressure max_pressure turbulence velocity"}
HEALTH = {"LayerHealth": "score status issues recommendations"}

BASIC = """
from gradient_flow import FlowAnalyzer

analyzer = FlowAnalyzer(model)
report = analyzer.analyze(x, y, loss_fn)
report.print_summary()
"""
BY_ARCHITECTURE = """
from gradient_flow import StandardAnalyzer, TemporalAnalyzer, AttentionAnalyzer

# MLPs, CNNs
standard = StandardAnalyzer()
report = standard.analyze(cnn_model, x, y, loss_fn)

# RNNs, LSTMs
temporal = TemporalAnalyzer(sequence_length=100)
report = temporal.analyze(rnn_model, seqs, targets, loss_fn)

# Transformers
attention = AttentionAnalyzer(num_heads=8)
report = attention.analyze(transformer, tokens, labels, loss_fn)
"""
COMPARATIVE = """
from gradient_flow import ComparativeAnalyzer

comparator = ComparativeAnalyzer()

# Track training
comparator.track_training(model, x, y, loss_fn, step=100)
comparator.track_training(model, x, y, loss_fn, step=500)

# View evolution
health_over_time = comparator.get_health_evolution("fc1")
"""
FIXING = """
from gradient_flow import gradient_scale

class FixedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.compress_down = nn.Linear(256, 64)
        self.compress_proj = nn.Linear(64, 16)

    def forward(self, x):
        x = self.norm(x)
        x = gradient_scale(x, 0.01)
        x = self.compress_down(x)
        x = F.gelu(x)
        x = self.compress_proj(x)
        return x
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Last(nn.Module):
    """A classifier of sequences."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        return self.head((out[0] if isinstance(out, tuple) else out)[:, -1])


@pytest.fixture
def given() -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    return {"model": Net(), "x": x, "y": y, "loss_fn": nn.CrossEntropyLoss()}


def test_every_documented_name_exists() -> None:
    assert set(NAMES.split()) == set(compat.__all__)
    for name, methods in METHODS.items():
        assert [m for m in methods.split() if not callable(getattr(getattr(compat, name), m, None))] == [], name
    for name, fields in (METRICS | HEALTH).items():
        assert set(fields.split()) <= set(getattr(compat, name).__dataclass_fields__), name


def test_basic_analysis(run_snippet: Any, given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    found = run_snippet(BASIC, "gradient_flow", given)
    assert found["report"].layer("fc1").metrics.mean_pressure > 0
    assert "health" in capsys.readouterr().out


def test_analysis_by_architecture(run_snippet: Any, given: dict[str, Any]) -> None:
    y = torch.randint(3, (4,))
    encoder = nn.TransformerEncoderLayer(16, 8, 32, batch_first=True)
    found = run_snippet(
        BY_ARCHITECTURE,
        "gradient_flow",
        given | {
            "cnn_model": nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
            "x": torch.randn(8, 1, 8, 8),
            "rnn_model": Last(nn.LSTM(6, 8, batch_first=True), 8), "seqs": torch.randn(4, 100, 6), "targets": y,
            "transformer": Last(encoder, 16), "tokens": torch.randn(4, 5, 16), "labels": y,
        },
    )  # fmt: skip
    assert len(found["temporal"].get_timestep_profile()) == 100
    assert found["standard"].get_depth_profile()
    assert found["attention"].get_attention_profile()["query"]


def test_comparison_over_training(run_snippet: Any, given: dict[str, Any]) -> None:
    found = run_snippet(COMPARATIVE, "gradient_flow", given)
    assert list(found["health_over_time"]) == [100, 500]


def test_the_fix_scales_gradients_and_leaves_values(run_snippet: Any, given: dict[str, Any]) -> None:
    layer = run_snippet(FIXING, "gradient_flow", given)["FixedLayer"]()
    x = torch.randn(2, 256, requires_grad=True)
    layer(x).sum().backward()
    scaled = x.grad.clone()
    x.grad = None
    layer.compress_proj(nn.functional.gelu(layer.compress_down(layer.norm(x)))).sum().backward()
    torch.testing.assert_close(scaled, 0.01 * x.grad)


def test_hooks_collect_what_flows_and_leave(given: dict[str, Any]) -> None:
    model, seen = given["model"], {}
    with compat.HookManager() as hooks:
        hooks.register_forward_hook(model.fc2, compat.ForwardHook.create("fc2", seen.__setitem__))
        hooks.register_backward_hook(model.fc2, compat.BackwardHook.create("fc2.grad", seen.__setitem__))
        assert len(hooks) == 2
        given["loss_fn"](model(given["x"]), given["y"]).backward()
    expected = model(given["x"])
    assert torch.equal(seen["fc2"], expected)
    assert not seen["fc2"].requires_grad
    grad = torch.autograd.grad(given["loss_fn"](expected, given["y"]), expected)[0]
    torch.testing.assert_close(seen["fc2.grad"], grad)
    assert not model.fc2._forward_hooks
    assert not model.fc2._backward_hooks


def test_reporters(given: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    deep = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(6, 6), nn.Sigmoid())), nn.Linear(6, 3))
    report = compat.FlowAnalyzer(deep).analyze(given["x"], given["y"], given["loss_fn"])
    console = compat.ConsoleReporter()
    assert "VANISHING" in console.format_report(report)
    console.print_recommendations(report)
    assert report.issues[0].recommendation.splitlines()[0] in capsys.readouterr().out
    for shown in (console.print_summary, console.print_layer_summary, console.print_issues):
        shown(report)
        assert capsys.readouterr().out
    page = compat.HTMLReportGenerator(report).generate(output_path=tmp_path / "flow.html")
    assert page == (tmp_path / "flow.html").read_text()
    assert "VANISHING" in page
    with pytest.raises(ValueError, match="pass a report"):
        compat.HTMLReportGenerator().generate()
