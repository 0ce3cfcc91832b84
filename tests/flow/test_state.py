"""An analysis leaves a model, its loss, its batch and the random generators bit for bit as they were."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow import AttentionAnalyzer, FlowAnalyzer, StandardAnalyzer, TemporalAnalyzer, analyze


def bits(x: Any) -> list[Tensor]:
    tensors = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else [x]
    return [tensor.clone() for tensor in tensors]


def test_nothing_changes_and_every_layer_is_seen(case: Any, state: Any, changed: Any) -> None:
    before, batch = state(case.model, *case.others), bits(case.x)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        report = FlowAnalyzer(case.model).analyze(case.x, case.y, case.loss_fn)
    assert changed(before, state(case.model, *case.others)) == []
    assert all(map(torch.equal, batch, bits(case.x)))
    called = {layer.name for layer in report.layers if layer.is_leaf}
    weighted = {layer.name for layer in report.layers if layer.metrics.weight_grad_norm > 0}
    assert called
    assert weighted
    assert report.loss == report.loss  # a number


def test_nothing_changes_whichever_analyzers_fit(case: Any, state: Any, changed: Any) -> None:
    before = state(case.model, *case.others)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        analyze(case.model, case.x, case.y, case.loss_fn, steps=2)
    assert changed(before, state(case.model, *case.others)) == []


def test_nothing_changes_when_the_analysis_fails(state: Any, changed: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = torch.randn(8, 4)
    before = state(model)

    def broken(output: Tensor, y: Tensor) -> Tensor:
        raise ZeroDivisionError

    for analyzer in (FlowAnalyzer(model).analyze, lambda *a: StandardAnalyzer().analyze(model, *a)):
        with pytest.raises(ZeroDivisionError):
            analyzer(x, x, broken)
    assert changed(before, state(model)) == []


def test_a_gradient_of_the_inputs_stays_theirs() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    x.grad = torch.ones(4, 3)
    FlowAnalyzer(nn.Linear(3, 2)).analyze(x, None, lambda out: out.sum())
    assert torch.equal(x.grad, torch.ones(4, 3))


def test_a_parameter_inside_the_loss_keeps_its_gradient() -> None:
    temperature = torch.ones((), requires_grad=True)
    FlowAnalyzer(nn.Linear(3, 2)).analyze(torch.randn(4, 3), None, lambda out: (out * temperature).sum())
    assert temperature.grad is None


def test_it_works_where_gradients_are_switched_off() -> None:
    with torch.no_grad():
        report = FlowAnalyzer(nn.Linear(3, 2)).analyze(torch.randn(4, 3), None, lambda out: out.sum())
    assert report.layers[0].metrics.grad_norm > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(4, 3), None, lambda out: out), "it has shape"),
        ((torch.randn(4, 3), None, lambda out: out.sum().item()), "must be a tensor; loss_fn returned float"),
        ((torch.randn(4, 3), None, None), "no loss_fn was passed"),
        ((torch.randn(4, 3), torch.randn(4, 2), None), "Linear does not compute its own loss from labels"),
        ((torch.randn(4, 3), None, lambda out: out.sum(), 0), "at least 1"),
        ((torch.randn(4, 3), None, lambda out: out.sum(), 5), "cannot split"),
    ],
)
def test_wrong_questions_are_answered_in_a_sentence(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FlowAnalyzer(nn.Linear(3, 2)).analyze(*arguments)


def test_a_frozen_model_has_nothing_to_analyze() -> None:
    with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
        FlowAnalyzer(nn.Linear(3, 2).requires_grad_(False)).analyze(torch.randn(4, 3), None, lambda out: out.sum())


def test_a_lazy_model_is_asked_to_see_a_batch_first() -> None:
    with warnings.catch_warnings(action="ignore"):  # torch says that lazy modules are new
        model = nn.LazyLinear(3)
    with pytest.raises(UsageError, match="no shape yet"):
        FlowAnalyzer(model).analyze(torch.randn(4, 3), None, lambda out: out.sum())


def test_analyzers_say_when_the_model_is_not_for_them() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with pytest.raises(UsageError, match="no attention found"):
        AttentionAnalyzer().analyze(model, x, None, lambda out: out.sum())
    with pytest.raises(UsageError, match="no recurrent layer found"):
        TemporalAnalyzer().analyze(model, x, None, lambda out: out.sum())


def test_a_model_with_a_step_counter_and_a_cache_is_put_back() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cache = nn.Linear(3, 3), {"x": [1]}

        def forward(self, x: Tensor) -> Tensor:
            self.cache["y"] = [2]
            self.extra = x
            return self.linear(x)

    model = Cached()
    FlowAnalyzer(model).analyze(torch.randn(4, 3), None, lambda out: out.sum())
    assert model.cache == {"x": [1]}
    assert not hasattr(model, "extra")
