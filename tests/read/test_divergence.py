"""Where two runs part: real training runs, each with one difference planted at a known step and place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde

STEP = 12
Plant = Callable[[int, nn.Module, torch.Tensor, Any], torch.Tensor]


def nothing(step: int, model: nn.Module, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
    return x


def at_step(change: Plant) -> Plant:
    """The change, at one step only."""
    return lambda step, *rest: change(step, *rest) if step == STEP else rest[1]


@at_step
def other_batch(step: int, model: nn.Module, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
    return x + 0.1


@at_step
def other_weight(step: int, model: Any, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
    with torch.no_grad():
        model[3].weight.mul_(1.001)
    return x


@at_step
def other_rate(step: int, model: nn.Module, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
    optimizer.param_groups[0]["lr"] *= 2
    return x


@at_step
def other_function(step: int, model: Any, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
    model[2].negative_slope = 0.02
    return x


def train(
    name: str,
    plant: Plant = nothing,
    *,
    grad: Callable[[int, Any], None] | None = None,
    dtype: torch.dtype = torch.float32,
    activations: Any = True,
) -> Path:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LeakyReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    model = nn.Sequential(*layers).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with sonde.init(project="part", name=name, dir="runs", verbose=False, live_rules=False) as session:
        session.watch(model, optimizer, activations=activations)
        for step in range(20):
            x = plant(step, model, torch.randn(32, 8), optimizer).to(dtype)
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            if grad is not None:
                grad(step, model)
            optimizer.step()
            session.log({"loss": loss, "step_time": float(len(name))})
    return Path(session.path)


def part(name: str, plant: Plant = nothing, **options: Any) -> Any:
    return sonde.compare(train("a"), train(name, plant, **options)).first_divergence


def test_the_same_program_does_not_part_from_itself_whatever_its_clock_says() -> None:
    assert part("the same") is None


@pytest.mark.parametrize(
    ("plant", "kind", "site"),
    [
        (other_batch, "data", "batch"),
        (other_weight, "param", "3.weight"),
        (other_function, "act", "2"),
        (other_rate, "", "optim/lr"),
    ],
)
def test_the_first_place_is_the_planted_one(plant: Plant, kind: str, site: str) -> None:
    found = part("b", plant)
    assert (found.step, found.kind, found.site) == (STEP, kind, site)
    assert found.before == 0
    assert found.a != found.b


def test_a_gradient_is_named_where_it_went_wrong_and_not_in_the_layers_it_flowed_to() -> None:
    """Everything before the tanh gets another gradient; computed first, so at fault, is the one nearest the output."""

    def flip(step: int, model: Any) -> None:
        if step == STEP:
            for index in (0, 3):
                model[index].weight.grad.mul_(1.01)

    found = part("b", grad=flip)
    assert (found.step, found.series, found.tolerance) == (STEP, "grad/3.weight/norm", 1e-5)
    assert found.difference == pytest.approx(0.0099, rel=0.01)
    assert found.num_before > 20


def test_tolerance_for_rounding_depends_on_the_dtype() -> None:
    """The bias before the batch norm has no gradient but rounding, of which Adam makes whole steps: no difference."""
    found = sonde.compare(train("a"), train("double", dtype=torch.float64), tolerance=1e-12).first_divergence
    assert (found.step, found.tolerance) == (0, 1e-12)
    assert sonde.compare("part/a", "part/double").first_divergence is None


def test_a_nan_is_a_difference() -> None:
    def spoil(step: int, model: Any) -> None:
        if step == STEP:
            model[5].weight.grad[0, 0] = float("nan")

    found = part("b", grad=spoil)
    assert (found.step, found.kind, found.site) == (STEP, "grad", "5.weight")


def test_it_says_when_the_activations_were_not_recorded_there() -> None:
    found = sonde.compare(train("a", activations=False), train("b", other_function, activations=False)).first_divergence
    assert found.step == STEP
    assert found.unseen == ("activations",)


def test_forward_order_needs_no_structure_document() -> None:
    paths = train("a"), train("b", other_function)
    for path in paths:
        (path / "model.json").unlink()
    found = sonde.compare(*paths).first_divergence
    assert (found.step, found.kind, found.site) == (STEP, "act", "2")
