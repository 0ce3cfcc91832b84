"""What the Gradient Flow Toolkit documents runs with only the import changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonde.flow import (
    AttentionAnalyzer,
    ComparativeAnalyzer,
    FlowAnalyzer,
    FlowMetrics,
    GradientScale,
    LayerHealth,
    StandardAnalyzer,
    TemporalAnalyzer,
    gradient_scale,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_basic_analysis(capsys: pytest.CaptureFixture[str]) -> None:
    model, x, y, loss_fn = nn.Linear(4, 2), torch.randn(8, 4), torch.randint(2, (8,)), nn.CrossEntropyLoss()
    analyzer = FlowAnalyzer(model)
    report = analyzer.analyze(x, y, loss_fn)
    report.print_summary()
    assert "health 100/100" in capsys.readouterr().out
    (layer,) = report.layers
    assert isinstance(layer.metrics, FlowMetrics)
    assert isinstance(layer.health, LayerHealth)
    assert issubclass(GradientScale, torch.autograd.Function)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def test_architecture_specific_analysis() -> None:
    loss_fn = nn.CrossEntropyLoss()
    cnn_model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    standard = StandardAnalyzer()
    report = standard.analyze(cnn_model, torch.randn(8, 3, 8, 8), torch.randint(2, (8,)), loss_fn)
    assert report.issues == []

    temporal = TemporalAnalyzer(sequence_length=100)
    report = temporal.analyze(Recurrent(), torch.randn(4, 100, 4), torch.randint(2, (4,)), loss_fn)
    assert len(temporal.get_timestep_profile()) == 100
    assert "VANISHING_TEMPORAL" in {issue.type for issue in report.issues}

    layer = nn.TransformerEncoderLayer(16, 8, 32, batch_first=True)
    transformer = nn.Sequential(nn.Embedding(10, 16), layer, nn.Flatten(), nn.Linear(96, 2))
    attention = AttentionAnalyzer(num_heads=8)
    report = attention.analyze(transformer, torch.randint(10, (4, 6)), torch.randint(2, (4,)), loss_fn)
    assert len(attention.get_transformer_metrics().attention[0].entropy_by_head) == 8


def test_comparative_analysis() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc1(x)

    model, x, y, loss_fn = Model(), torch.randn(8, 4), torch.randint(2, (8,)), nn.CrossEntropyLoss()
    comparator = ComparativeAnalyzer()
    comparator.track_training(model, x, y, loss_fn, step=100)
    comparator.track_training(model, x, y, loss_fn, step=500)
    health_over_time = comparator.get_health_evolution("fc1")
    assert health_over_time == {100: 100.0, 500: 100.0}


class FixedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.compress_down = nn.Linear(256, 64)
        self.compress_proj = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = gradient_scale(x, 0.01)
        x = self.compress_down(x)
        x = F.gelu(x)
        x = self.compress_proj(x)
        return x  # noqa: RET504 - as documented


def test_fixing_issues() -> None:
    report = FlowAnalyzer(FixedLayer()).analyze(torch.randn(8, 256), None, lambda out: out.square().mean())
    assert report.layer("norm").metrics.grad_norm < 0.1 * report.layer("compress_down").metrics.grad_norm
    assert [issue for issue in report.issues if issue.type == "BOTTLENECK"] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_generator_and_buffers_stay_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2)).cuda()
    x, y = torch.randn(16, 8, device="cuda"), torch.randint(2, (16,), device="cuda")
    random, buffers = torch.cuda.get_rng_state(), [b.clone() for b in model.buffers()]
    report = FlowAnalyzer(model).analyze(x, y, nn.CrossEntropyLoss())
    assert torch.equal(random, torch.cuda.get_rng_state())
    assert all(map(torch.equal, buffers, model.buffers()))
    assert report.layer("0").metrics.grad_norm > 0
