"""What clipping did is recorded at the step it did it in, wherever in the step that was; compared in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from awkward import make_optimizer

STEPS = 5
Norms = dict[str, float]


def norms(model: nn.Module) -> Norms:
    return {n: p.grad.double().norm().item() for n, p in model.named_parameters() if p.grad is not None}


def by_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def with_norm(model: nn.Module) -> None:
    total = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.05, total)


def by_value_then_norm(model: nn.Module) -> None:
    by_value(model)
    by_norm(model)


def twice(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def by_layer(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model[0].parameters(), 0.05)  # type: ignore[index]
    nn.utils.clip_grad_norm_(model[2].parameters(), 0.03)  # type: ignore[index]


def some_steps_only(model: nn.Module) -> None:
    if torch.rand(()) < 0.5:
        by_norm(model)


CLIPS = [by_norm, by_value, with_norm, by_value_then_norm, twice, by_layer, some_steps_only]


class Loop:
    """A training that notes, in float64, the norm of every gradient before and after it is clipped."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer], clip: Callable[[nn.Module], None]) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        self.optimizer, self.clip = optimizer(self.model.parameters()), clip
        self.now: tuple[Norms, Norms] = {}, {}
        self.steps: list[tuple[Norms, Norms]] = []

    def gradients(self, *, set_to_none: bool, accumulate: int) -> Tensor:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(accumulate):
            loss: Tensor = self.model(torch.randn(7, 6)).square().mean() * 10 / accumulate
            loss.backward()
        before = norms(self.model)
        self.clip(self.model)
        self.now = before, norms(self.model)
        return loss

    def train(self, *, has_closure: bool, set_to_none: bool = True, accumulate: int = 1) -> None:
        def closure() -> Tensor:
            return self.gradients(set_to_none=set_to_none, accumulate=accumulate)

        for _ in range(STEPS):
            if has_closure:
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()
            self.steps.append(self.now)

    def check(self, run: Any) -> None:
        for name in self.steps[0][0]:
            for stat, wanted in (
                ("norm", [after[name] for _, after in self.steps]),
                ("norm_preclip", [before[name] for before, _ in self.steps]),
                ("clip_factor", [after[name] / before[name] for before, after in self.steps]),
            ):
                table = run.stats(f"grad/{name}/{stat}")
                assert table["step"].to_pylist() == list(range(STEPS)), (name, stat)
                assert table["value"].to_pylist() == pytest.approx(wanted, rel=2e-5), (name, stat)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw-fused", "lbfgs"])
def test_a_closure_that_clips_is_of_its_step(clip: Any, optimizer: str, begin: Any, reopen: Any) -> None:
    loop = Loop(lambda ps: _optimizer(optimizer, ps), clip)
    begin().watch(loop.model, loop.optimizer)
    loop.train(has_closure=True)
    loop.check(reopen())


def _optimizer(kind: str, params: Any) -> torch.optim.Optimizer:
    """LBFGS calls its closure several times in a step: the last gradients are those of the step."""
    return torch.optim.LBFGS(params, max_iter=3) if kind == "lbfgs" else make_optimizer(kind, params)


@pytest.mark.parametrize("clip", CLIPS)
def test_a_clip_before_the_step_is_of_that_step(clip: Any, begin: Any, reopen: Any) -> None:
    loop = Loop(lambda ps: make_optimizer("adamw-foreach", ps), clip)
    begin().watch(loop.model, loop.optimizer)
    loop.train(has_closure=False)
    loop.check(reopen())


@pytest.mark.parametrize("has_closure", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_that_are_zeroed_or_accumulated_are_clipped_again(
    has_closure: bool, set_to_none: bool, accumulate: int, begin: Any, reopen: Any
) -> None:
    loop = Loop(lambda ps: torch.optim.SGD(ps, lr=0.1), by_norm)
    begin().watch(loop.model, loop.optimizer)
    loop.train(has_closure=has_closure, set_to_none=set_to_none, accumulate=accumulate)
    run = reopen()
    loop.check(run)
    assert run.stats("grad/0.weight/clip_factor")["value"].to_pylist() < [0.5] * STEPS


@pytest.mark.parametrize("has_closure", [True, False])
def test_the_total_norm_and_the_limit_are_those_of_their_step(has_closure: bool, begin: Any, reopen: Any) -> None:
    loop = Loop(lambda ps: torch.optim.Adam(ps, lr=0.1), by_norm)
    begin().watch(loop.model, loop.optimizer)
    loop.train(has_closure=has_closure)
    run = reopen()
    wanted = [math.hypot(*before.values()) for before, _ in loop.steps]
    norm, limit = run.scalars("optim/grad_norm"), run.scalars("optim/max_norm")
    assert norm["step"].to_pylist() == limit["step"].to_pylist() == list(range(STEPS))
    assert norm["value"].to_pylist() == pytest.approx(wanted, rel=1e-6)
    assert limit["value"].to_pylist() == [0.05] * STEPS


def test_parts_that_are_clipped_by_themselves_have_their_own_total_norm(begin: Any, reopen: Any) -> None:
    loop = Loop(lambda ps: torch.optim.Adam(ps, lr=0.1), by_layer)
    begin().watch(loop.model, loop.optimizer)
    loop.train(has_closure=True)
    run = reopen()
    for place, layer, limit in (("optim", "0", 0.05), ("optim/clip.1", "2", 0.03)):
        wanted = [math.hypot(before[f"{layer}.weight"], before[f"{layer}.bias"]) for before, _ in loop.steps]
        assert run.scalars(f"{place}/grad_norm")["value"].to_pylist() == pytest.approx(wanted, rel=1e-6)
        assert run.scalars(f"{place}/max_norm")["value"].to_pylist() == [limit] * STEPS


def test_two_optimizers_have_their_own_total_norms(begin: Any, reopen: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    begin().watch(model, optimizers)
    wanted: list[list[float]] = [[], []]
    for _ in range(STEPS):
        for number, (part, optimizer) in enumerate(zip(model, optimizers, strict=True)):
            model.zero_grad()
            model(torch.randn(3, 4)).square().sum().backward()
            wanted[number].append(math.hypot(*norms(part).values()))
            nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            optimizer.step()
    run = reopen()
    for place, totals in zip(("optim", "optim/1"), wanted, strict=True):
        table = run.scalars(f"{place}/grad_norm")
        assert table["step"].to_pylist() == list(range(STEPS))
        assert table["value"].to_pylist() == pytest.approx(totals, rel=1e-6)


def test_a_clip_that_no_step_followed_is_not_that_of_the_next_step(begin: Any, reopen: Any) -> None:
    """As where the user leaves a batch out because its norm is too large."""
    loop = Loop(lambda ps: torch.optim.SGD(ps, lr=0.1), by_norm)
    begin().watch(loop.model, loop.optimizer)
    loop.gradients(set_to_none=True, accumulate=1)
    loop.clip = lambda model: None
    loop.train(has_closure=False)
    run = reopen()
    loop.check(run)
    assert run.scalars("optim/grad_norm*").num_rows == 0


def test_clipping_by_hand_leaves_both_norms_as_they_were_used(begin: Any, reopen: Any) -> None:
    """Multiplying a gradient is not known to be clipping; what is recorded is what the optimizer used."""

    def by_hand(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1)

    loop = Loop(lambda ps: torch.optim.SGD(ps, lr=0.1), by_hand)
    begin().watch(loop.model, loop.optimizer)
    loop.train(has_closure=True)
    run = reopen()
    used = pytest.approx([after["0.weight"] for _, after in loop.steps], rel=1e-6)
    assert run.stats("grad/0.weight/norm")["value"].to_pylist() == used
    assert run.stats("grad/0.weight/norm_preclip")["value"].to_pylist() == used


@pytest.mark.parametrize("has_closure", [True, False])
def test_what_was_before_a_clip_is_unknown_where_the_gradient_was_changed_after_it(
    has_closure: bool, begin: Any, reopen: Any
) -> None:
    def then_by_hand(model: nn.Module) -> None:
        by_norm(model)
        model[0].weight.grad.mul_(0.5)  # type: ignore[index, union-attr, operator]

    loop = Loop(lambda ps: torch.optim.SGD(ps, lr=0.1), then_by_hand)
    begin().watch(loop.model, loop.optimizer)
    loop.train(has_closure=has_closure)
    run = reopen()
    for stat in ("norm_preclip", "clip_factor"):
        assert all(map(math.isnan, run.stats(f"grad/0.weight/{stat}")["value"].to_pylist())), stat
    assert run.stats("grad/0.bias/norm_preclip")["value"].to_pylist() == pytest.approx(
        [before["0.bias"] for before, _ in loop.steps], rel=2e-5
    )


def test_a_clip_to_nothing_does_not_claim_that_nothing_was_clipped(begin: Any, reopen: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    model[1].bias.grad.fill_(math.inf)  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    run = reopen()
    assert run.stats("grad/0.weight/norm")["value"].to_pylist() == [0.0]
    assert math.isnan(run.stats("grad/0.weight/norm_preclip")["value"].to_pylist()[0])


def test_a_clip_that_raises_does_not_count(begin: Any, reopen: Any) -> None:
    loop = Loop(lambda ps: torch.optim.SGD(ps, lr=0.1), lambda model: None)
    begin().watch(loop.model, loop.optimizer)
    loop.model(torch.full((1, 6), math.nan)).sum().backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0, error_if_nonfinite=True)
    loop.clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)  # type: ignore[assignment]
    loop.train(has_closure=True)
    loop.check(reopen())


@pytest.mark.parametrize("kind", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_a_loop_that_steps_by_hand_has_its_clips(kind: Any, begin: Any, reopen: Any) -> None:
    model = nn.Linear(3, 1)
    session = begin().watch(model)
    before = []
    for step in range(STEPS):
        model.zero_grad()
        (model(torch.ones(1, 3)).sum() * (step + 2)).backward()
        before.append(model.weight.grad.double().norm().item())  # type: ignore[union-attr]
        kind(model.parameters(), 0.5)
        session.step()
    run = reopen()
    assert run.stats("grad/weight/norm_preclip")["value"].to_pylist() == pytest.approx(before, rel=1e-5)
    is_by_norm = kind is nn.utils.clip_grad_norm_
    assert run.scalars("optim/grad_norm*")["step"].to_pylist() == (list(range(STEPS)) if is_by_norm else [])
