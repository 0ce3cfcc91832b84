"""A step that a scaler skips is reported once, and the scaler is left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from sonde.probe.optimizer.scaler import ScalerTap, loss_scale


@pytest.fixture
def skipped() -> Iterator[list[Any]]:
    found: list[Any] = []

    def on_error(where: str, error: Exception) -> None:
        raise AssertionError(where) from error

    tap = ScalerTap(found.append, on_error)
    yield found
    tap.detach()


def step(optimizer: torch.optim.Optimizer, scaler: GradScaler, factor: float = 1.0) -> None:
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.zero_grad()
    scaler.scale(weight.sum() * factor).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()


def sgd(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1, **options)


@pytest.mark.parametrize("kind", [GradScaler, type("Own", (GradScaler,), {})])
def test_only_steps_that_were_not_made_are_reported(skipped: list[Any], kind: Any) -> None:
    optimizer, scaler = sgd(), kind("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        step(optimizer, scaler, factor)
    assert skipped == [optimizer]


def test_a_fused_optimizer_tells_by_itself(skipped: list[Any]) -> None:
    step(sgd(fused=True), GradScaler("cpu"), float("nan"))
    assert skipped == []


def test_a_scaler_that_is_off_scales_nothing(skipped: list[Any]) -> None:
    scales = []
    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: scales.append(loss_scale()))
    step(optimizer, GradScaler("cpu", enabled=False), float("nan"))
    step(optimizer, GradScaler("cpu", init_scale=8.0))
    assert (skipped, scales) == ([], [None, torch.tensor([8.0])])
    assert loss_scale() is None


def test_an_optimizer_from_elsewhere_is_not_judged(skipped: list[Any]) -> None:
    class Alike:
        """Has what a scaler asks for, and no hooks."""

        def __init__(self) -> None:
            self.param_groups = sgd().param_groups
            self.zero_grad = lambda: None

        def step(self) -> None: ...

    step(Alike(), GradScaler("cpu"))  # type: ignore[arg-type]
    assert skipped == []


def test_an_error_of_the_users_is_theirs(skipped: list[Any]) -> None:
    optimizer, scaler = sgd(), GradScaler("cpu")
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)
    assert (skipped, loss_scale()) == ([], None)


def test_the_scaler_is_as_it_was_without_a_listener() -> None:
    from torch.optim import optimizer as torch_optimizer

    before = GradScaler.step, dict(torch_optimizer._global_optimizer_pre_hooks)
    taps = [ScalerTap(lambda _: None, lambda *_: None) for _ in range(2)]
    taps[0].detach()
    assert GradScaler.step is not before[0]
    taps[1].detach()
    taps[1].detach()
    assert (GradScaler.step, dict(torch_optimizer._global_optimizer_pre_hooks)) == before


def test_a_later_replacement_stays_and_nothing_is_reported_twice() -> None:
    original = GradScaler.step
    first, found = ScalerTap(lambda _: None, lambda *_: None), []
    ours = GradScaler.step

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    GradScaler.step = theirs  # type: ignore[assignment, method-assign]
    try:
        first.detach()
        assert GradScaler.step is theirs
        second = ScalerTap(found.append, lambda *_: None)
        optimizer = sgd()
        step(optimizer, GradScaler("cpu"), float("inf"))
        step(optimizer, GradScaler("cpu"))
        second.detach()
        assert found == [optimizer]
    finally:
        GradScaler.step = original  # type: ignore[method-assign]
