"""A compiled model gets the verdict of its eager self; a scripted one, whose layers no hook sees, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow import FlowReport, analyze


def fading() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Linear(16, 16), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(16, 4))


class Around(nn.Module):
    """Calls a model through a compiled function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.call = torch.compile(lambda x: model(x), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


def blocks(model: nn.Sequential) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")
    model[2].compile(backend="eager")
    return model


def warmed(model: nn.Sequential) -> nn.Module:
    compiled: Any = torch.compile(model, backend="eager")
    compiled(torch.randn(64, 16)).sum().backward()
    return compiled


def verdict(report: FlowReport) -> Any:
    layers = [(layer.name, layer.type, layer.health.status, layer.metrics.grad_norm) for layer in report.layers]
    return report.model_name, report.status, layers, [(i.type, i.severity, i.layer) for i in report.issues]


def judge(model: nn.Module) -> FlowReport:
    torch.manual_seed(1)
    return analyze(model, torch.randn(64, 16), torch.randint(4, (64,)), nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    "compiled",
    [lambda m: torch.compile(m, backend="eager"), in_place, blocks, warmed],
    ids=["torch.compile", "model.compile", "blocks", "warmed"],
)
def test_a_compiled_model_gets_the_verdict_of_its_eager_self(compiled: Callable[[Any], nn.Module]) -> None:
    eager = verdict(judge(fading()))
    assert eager[1] == "CRITICAL"
    assert verdict(judge(compiled(fading()))) == eager


def test_a_compiled_function_inside_is_followed() -> None:
    report = judge(Around(fading()))
    assert report.status == "CRITICAL"
    assert report.layer("inner.0").metrics.grad_norm > 0


@pytest.mark.parametrize("scripted", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(64, 16))])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_refused(scripted: Callable[[Any], nn.Module]) -> None:
    with pytest.raises(UsageError, match="TorchScript"):
        judge(scripted(fading()))
