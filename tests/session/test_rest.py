"""Steps between two recorded ones are only counted: nothing else may differ from steps that are followed in full."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader, TensorDataset

import sonde
from sonde.budget.governor import Governor

RARELY = sonde.every(20)
SPARSE: dict[str, Any] = {"when": RARELY, "activations": RARELY, "inspect": RARELY}


@pytest.fixture(autouse=True)
def _only_as_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which steps rest depends on measured times. Here a step rests if its schedule records nothing: the numbers that
    are otherwise recorded at every step do not keep it awake."""
    usual = Governor.quiet_until
    monkeypatch.setattr(
        Governor, "quiet_until", lambda self, kinds: 10**9 if set(kinds) == {"scalars"} else usual(self, kinds)
    )


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[], None] = lambda: None) -> Any:
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,)))
    after()
    loss.backward()
    optimizer.step()
    return loss.detach()


def watched(begin: Callable[..., Any], *models: Any, **options: Any) -> Any:
    """A session that records every 20th step, and rests in between."""
    session = begin(check_finite=False, system_metrics=False)
    for number, (model, optimizer) in enumerate(models):
        session.watch(model, optimizer, **{**SPARSE, "prefix": f"m{number}." if number else "", **options})
    return session


def is_resting(session: Any) -> bool:
    return bool(session.steps.rest.is_on)


def rested(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train until the session rests."""
    for _ in range(19):
        train(model, optimizer)
        if is_resting(session):
            return
    raise AssertionError("it never rests")


def scalar(run: Any, name: str) -> dict[int, float]:
    table = run.scalars(name)
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_steps_that_record_nothing_are_counted_and_cause_no_module_hook(
    begin: Callable[..., Any], reopen: Callable[[], Any]
) -> None:
    model, optimizer = small()
    hooks = len(torch_module._global_forward_hooks)
    session = watched(begin, (model, optimizer))
    resting = []
    for _ in range(60):
        train(model, optimizer, lambda: resting.append(len(torch_module._global_forward_hooks) == hooks))
    assert session.step_number == 59
    # A recorded step and the first few, in which the pattern is learnt, are followed.
    assert not any(resting[:9])
    assert [step for step in range(21, 60) if not resting[step]] == [40]
    run = reopen()
    assert len(torch_module._global_forward_hooks) == hooks
    assert sorted(set(run.stats("grad/*/norm")["step"].to_pylist())) == [0, 20, 40]
    assert sorted(set(run.stats("update/*/norm")["step"].to_pylist())) == [0, 20, 40]
    assert sorted(set(run.stats("act/*/norm")["step"].to_pylist())) == [0, 20, 40]


def test_steps_are_compared_with_rests_in_which_nothing_else_was_done(begin: Callable[..., Any]) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    contrast = session.steps.training.governing.governor.contrast
    for _ in range(61):
        train(model, optimizer)
    num_rests = contrast.num_rests
    assert num_rests == 3  # up to the steps 20, 40 and 60
    assert contrast.bare_s > 0
    rested(session, model, optimizer)
    with torch.no_grad():
        model(torch.randn(2, 4))
    for _ in range(20):
        train(model, optimizer)
    assert contrast.num_rests == num_rests, "an evaluation took part of the time"


def test_values_logged_before_and_after_the_update_have_the_same_step(
    begin: Callable[..., Any], reopen: Callable[[], Any]
) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    for step in range(60):
        train(model, optimizer, lambda step=step: session.log({"inside": step}))  # type: ignore[misc]
        session.log({"after": step})
        with torch.no_grad():
            model(torch.randn(2, 4))
        session.log({"later": step})
    run = reopen()
    for name in ("inside", "after", "later"):
        assert scalar(run, name) == {step: step for step in range(60)}, name


def test_numbers_of_recorded_steps_are_those_of_a_run_without_rest(
    begin: Callable[..., Any], reopen: Callable[[], Any]
) -> None:
    found = []
    for schedule in (RARELY, True):
        model, optimizer = small()
        session = watched(begin, (model, optimizer), when=schedule, activations=schedule, inspect=schedule)
        torch.manual_seed(1)
        for _ in range(45):
            optimizer.zero_grad()
            functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        assert session.recording.breaker.num_errors == 0
        run = reopen()
        rows = run.stats("*").to_pylist()
        kept = {(row["kind"], row["site"], row["stat"], row["step"]): row["value"] for row in rows}
        found.append({key: value for key, value in kept.items() if key[3] in (20, 40)})
        norms = {step: value for step, value in scalar(run, "optim/grad_norm").items() if step in (20, 40)}
        found[-1] |= {("optim", "", "grad_norm", step): value for step, value in norms.items()}
    sparse, dense = found
    assert sparse
    assert set(sparse) == set(dense)
    differing = {key for key, value in sparse.items() if value != pytest.approx(dense[key], nan_ok=True)}
    assert differing == set()


def test_a_validation_loss_is_seen_in_steps_that_record_nothing(
    begin: Callable[..., Any], reopen: Callable[[], Any]
) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    trained = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    held_out = TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    expected: dict[int, float] = {}
    step = -1
    for _ in range(8):
        for x, y in DataLoader(trained, batch_size=8):
            model.train()
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
        model.eval()
        with torch.no_grad():
            losses = [functional.cross_entropy(model(x), y) for x, y in DataLoader(held_out, batch_size=8)]
        expected[step] = float(torch.stack(losses).mean())
        assert session.step_number == step
    found = scalar(reopen(), "data/loss/validation")
    assert found == pytest.approx(expected)


def test_a_scheduled_snapshot_ends_the_rest(begin: Callable[..., Any], reopen: Callable[[], Any]) -> None:
    model, optimizer = small()
    snapshots = sonde.Snapshots(kinds=["param"], when=lambda step: step in (13, 27))
    watched(begin, (model, optimizer), snapshots=snapshots)
    weights = []
    for _ in range(40):
        weights.append(model[0].weight.detach().clone())  # type: ignore[index]
        train(model, optimizer)
    run = reopen()
    # A schedule of one's own includes step 0.
    assert run.tensors.snapshots()["step"].to_pylist() == [0, 13, 27]
    for step in (13, 27):
        assert torch.equal(torch.from_numpy(np.asarray(run.tensors.snapshot(step)["param/0.weight"])), weights[step])


def test_a_requested_snapshot_ends_the_rest(begin: Callable[..., Any], reopen: Callable[[], Any]) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    rested(session, model, optimizer)
    asked: list[int | None] = []
    thread = threading.Thread(target=lambda: asked.append(session.snapshot()))
    thread.start()
    thread.join()
    train(model, optimizer)
    train(model, optimizer)
    train(model, optimizer, lambda: asked.append(session.snapshot()))
    train(model, optimizer)
    assert asked == [9, 11]
    assert reopen().tensors.snapshots()["step"].to_pylist() == [9, 11]


def test_another_optimizer_ends_the_rest(begin: Callable[..., Any], reopen: Callable[[], Any]) -> None:
    model, optimizer = small()
    session = begin(check_finite=False, system_metrics=False)
    session.watch(model, **SPARSE)
    rested(session, model, optimizer)
    before = session.step_number
    other = torch.optim.Adam(model.parameters())
    train(model, other)
    assert not is_resting(session)
    train(model, other)
    assert session.step_number >= before + 2


def test_two_optimizers_that_take_turns_are_one_step(begin: Callable[..., Any]) -> None:
    first, second = small(), small()
    session = watched(begin, first, second)
    for _ in range(15):
        train(*first)
        train(*second)
    assert is_resting(session)
    assert session.step_number == 14
    train(*first)
    assert session.step_number == 15
    train(*first)  # without the second: not as before
    assert not is_resting(session)
    assert session.step_number == 16


def test_a_pass_that_is_not_for_training_does_not_start_a_step(
    begin: Callable[..., Any], reopen: Callable[[], Any]
) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    for step in range(30):
        model.train()
        train(model, optimizer)
        if step % 7 == 6:
            model.eval()
            model(torch.randn(2, 4))  # gradients are on, but never used
        session.log({"after": step})
    assert scalar(reopen(), "after") == {step: step for step in range(30)}


def test_a_step_with_a_closure_is_counted(begin: Callable[..., Any], reopen: Callable[[], Any]) -> None:
    model, _ = small()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    session = watched(begin, (model, optimizer))
    x, y = torch.randn(8, 4), torch.randint(2, (8,))
    for step in range(30):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            session.log({"inside": step})
            return loss

        optimizer.step(closure)
        session.log({"after": step})
    assert session.step_number == 29
    run = reopen()
    assert scalar(run, "inside") == scalar(run, "after") == {step: step for step in range(30)}


def test_a_step_that_raises_is_not_counted(begin: Callable[..., Any]) -> None:
    model, optimizer = small()

    class Broken(torch.optim.SGD):
        fails = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ArithmeticError("no")
            return super().step(closure)

    optimizer = Broken(model.parameters(), lr=0.1)
    session = watched(begin, (model, optimizer))
    for _ in range(15):
        train(model, optimizer)
    before = session.step_number
    optimizer.fails = True
    with pytest.raises(ArithmeticError):
        train(model, optimizer)
    optimizer.fails = False
    train(model, optimizer)
    assert session.step_number == before + 1


def test_accumulated_gradients_are_one_step(begin: Callable[..., Any], reopen: Callable[[], Any]) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    for step in range(40):
        for _ in range(3):
            functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            session.log({"inside": step})
        optimizer.step()
        optimizer.zero_grad()
    assert session.step_number == 39
    assert set(scalar(reopen(), "inside").items()) == {(step, float(step)) for step in range(40)}


def test_a_run_that_ended_at_rest_resumes_after_its_last_step(begin: Callable[..., Any]) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    for _ in range(18):
        train(model, optimizer)
    assert is_resting(session)
    session.finish()
    assert begin(resume=session.path.name).recording.next_step == 18


def test_a_model_watched_at_rest_is_recorded(begin: Callable[..., Any], reopen: Callable[[], Any]) -> None:
    first, second = small(), small()
    session = watched(begin, first)
    rested(session, *first)
    session.watch(*second, prefix="second.", **{**SPARSE, "when": True})
    assert not is_resting(session)
    for _ in range(3):
        train(*first)
        train(*second)
    sites = set(reopen().stats("grad/*/norm")["site"].to_pylist())
    assert {site for site in sites if site.startswith("second.")}


def test_a_rewind_at_rest_continues_at_its_step(begin: Callable[..., Any], reopen: Callable[[], Any]) -> None:
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    rested(session, model, optimizer)
    session.rewind(4)
    for step in range(4, 24):
        train(model, optimizer)
        session.log({"after": step})
    assert session.step_number == 23
    assert scalar(reopen(), "after") == {step: step for step in range(4, 24)}


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda x: None,
    "batch": sonde.batch,
    "batch with ids": lambda x: sonde.batch(x, ids=list(range(len(x)))),
    "tap": lambda x: sonde.tap("input", x),
    "batch and tap": lambda x: (sonde.batch(x), sonde.tap("input", x)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("place", ["before the pass", "after the pass", "after the step"])
def test_values_logged_while_it_rests_get_the_step_at_which_they_were_logged(
    begin: Callable[..., Any], reopen: Callable[[], Any], call: str, place: str
) -> None:
    """An announced batch made the values of a whole rest wait for its end, and get its step."""
    model, optimizer = small()
    session = watched(begin, (model, optimizer))
    num_resting = 0
    for step in range(45):
        x = torch.randn(8, 4)
        if place == "before the pass":
            CALLS[call](x)
            sonde.log({"before": float(step)} if call.startswith("batch") else {})
        loss = model(x).square().mean()
        if place == "after the pass":
            CALLS[call](x)
        sonde.log({"inside": float(step)})
        optimizer.zero_grad()
        loss.backward()
        num_resting += is_resting(session)
        optimizer.step()
        sonde.log({"after": float(step)})
        if place == "after the step" and not call.startswith("batch"):
            CALLS[call](x)
    sonde.finish()
    assert num_resting > 15
    run = reopen()
    for name in [name for name in ("before", "inside", "after") if name in run.scalar_names]:
        assert scalar(run, name) == {step: float(step) for step in range(45)}, name
