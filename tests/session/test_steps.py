"""Everything is recorded at the step it belongs to, and steps are counted once, whatever the loop looks like.

Each value that a loop logs is the number of the step it belongs to: what was recorded is right where the two are equal.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde
from numbered import STEPS, batch, check_count, check_steps, net, rows_seen, sgd
from sonde.testing.by_hand import digest

COLUMNS = ["name", "step", "value"]


# ----------------------------------------------------------------------------------------- forward passes between steps


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_eval", [False, True])
def test_a_forward_pass_after_the_step_belongs_to_that_step(
    is_kept: bool, is_eval: bool, begin: Any, reopen: Any
) -> None:
    """Train accuracy, outside of no_grad; whether the graph of it is freed at once, or lives until the next batch."""
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    kept: Any = None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(2)).square().mean() * 0 + step
        loss.backward()
        optimizer.step()
        model.train(not is_eval)
        out = model(batch(5))
        model.train()
        if is_kept:
            kept = out
        del out
        session.log({"loss": loss, "accuracy": step})
        session.tap("seen", torch.full((1,), float(step)))
    del kept
    run = reopen()
    check_steps(run, "loss", "accuracy")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS
    taps = run.stats("custom/seen/mean")
    assert taps["step"].to_pylist() == taps["value"].to_pylist() == list(range(STEPS))


def test_a_loss_logged_before_its_backward_pass_belongs_to_the_step_being_made(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        loss = model(batch()).square().mean()
        session.log({"before": step})
        optimizer.zero_grad()
        loss.backward()
        session.log({"between": step})
        optimizer.step()
        session.log({"after": step})
    run = reopen()
    check_steps(run, "before", "between", "after")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS


def test_a_forward_pass_before_and_a_loss_after_are_told_apart(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        loss = model(batch(2)).square().mean()
        session.log({"loss": step})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look = model(batch(5))
        session.log({"accuracy": step})
        again = model(batch(7)).mean()
        session.log({"again": step, "mean": again * 0 + step})
        session.log({"given": step}, step=step)
    del look, again
    run = reopen()
    check_steps(run, "loss", "accuracy", "again", "mean", "given")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS


@pytest.mark.parametrize("num_looks", [1, 300])
def test_an_evaluation_with_gradients_on_is_not_part_of_the_next_step(num_looks: int, begin: Any, reopen: Any) -> None:
    """Neither what it shows nor what it logs, and nothing of it is held."""
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True, inspect=False)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
        optimizer.step()
        model.eval()
        for _ in range(num_looks):
            total = model(batch(3)).sum().item()
            session.log({"batch": step, "total": total})
            assert len(session.steps.training.steps.passes) <= 1
        model.train()
        session.log({"val": step})
    run = reopen()
    check_steps(run, "val", steps=3)
    check_steps(run, "batch", steps=3, each=num_looks)
    check_count(run, 3)
    assert rows_seen(run) == [2, 2, 2]


def test_a_last_look_at_the_model_adds_no_step(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
        optimizer.step()
        session.log({"loss": step})
    out = model(batch(9))
    session.log({"final": out.mean() * 0 + STEPS - 1})
    run = reopen()
    check_count(run)
    assert rows_seen(run) == [2] * STEPS
    assert run.scalars("final")["step"].to_pylist() == [STEPS - 1]


def test_a_forward_pass_before_the_first_step_does_not_belong_to_it(begin: Any, reopen: Any) -> None:
    """As to find out the shapes."""
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    out = model(batch(9))
    session.log({"shape": 0})
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
        optimizer.step()
        session.log({"loss": step})
    del out
    run = reopen()
    check_count(run)
    check_steps(run, "loss")
    assert rows_seen(run) == [2] * STEPS
    assert run.scalars("shape")["step"].to_pylist() == [0]


def test_a_model_that_is_never_trained_is_recorded(begin: Any, reopen: Any) -> None:
    model = net()
    session = begin().watch(model, activations=True)
    for _ in range(3):
        out = model(batch(2))
        session.log({"mean": 0})
    del out
    run = reopen()
    assert run.stats("act/2/n")["step"].to_pylist() == [0]
    assert run.scalars("mean")["step"].to_pylist() == [0, 0, 0]


def test_a_step_by_hand_ends_what_is_logged(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
        optimizer.step()
        look = model(batch(5))
        session.log({"accuracy": step})
        session.step()
        if step < STEPS - 1:
            session.log({"next": step + 1})
    del look
    run = reopen()
    check_steps(run, "accuracy")
    assert run.scalars("next")["step"].to_pylist() == run.scalars("next")["value"].to_pylist() == [1, 2, 3, 4, 5]
    check_count(run)
    assert rows_seen(run) == [2] * STEPS


def test_a_batch_that_is_announced_begins_the_step(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        x = batch(2)
        session.batch(x)
        session.log({"announced": step})
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        look = model(batch(5))
        session.log({"accuracy": step})
    del look
    run = reopen()
    check_steps(run, "announced", "accuracy")
    assert run.scalars("data/batch/hash")["step"].to_pylist() == list(range(STEPS))
    check_count(run)


def test_what_is_inspected_of_a_step_is_its_own_pass(begin: Any, reopen: Any) -> None:
    """The inputs, the loss and the identity of the batch; not those of a forward pass before it."""

    def train(is_looking: bool) -> Any:
        model = net()
        optimizer = sgd(model)
        session = begin(name=f"looking {is_looking}").watch(model, optimizer, inspect=sonde.every(1))
        generator = torch.Generator().manual_seed(1)
        look = None
        for _ in range(STEPS):
            x, y = torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            if is_looking:
                look = model(torch.full((4, 3), 100.0))
                nn.functional.mse_loss(look, torch.zeros(4, 1))
        session.flush()
        del look
        return reopen()

    bare, looking = train(is_looking=False), train(is_looking=True)
    for pattern in ("data/*", "unit/*"):
        a, b = bare.scalars(pattern), looking.scalars(pattern)
        assert a.num_rows
        assert sorted(map(repr, a.select(COLUMNS).to_pylist())) == sorted(map(repr, b.select(COLUMNS).to_pylist()))


def test_a_snapshot_shows_the_step_and_not_a_forward_pass_before_it(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(
        model, optimizer, snapshots=sonde.Snapshots(when=sonde.every(1), kinds=("param", "act", "batch"))
    )
    inputs, outputs = [], []
    look: Any = None
    for step in range(4):
        x = torch.full((2, 3), float(step))
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        inputs.append(x)
        outputs.append(out.detach().clone())
        optimizer.step()
        look = model(torch.full((2 + step % 2, 3), 100.0))
        session.log({"accuracy": step})
    del look
    run = reopen()
    assert run.tensors.snapshots()["step"].to_pylist()[:4] == [0, 1, 2, 3]
    for step in range(4):
        shown = run.tensors.snapshot(step)
        assert torch.equal(torch.from_numpy(shown["batch/input.0"]), inputs[step])
        assert torch.equal(torch.from_numpy(shown["act/model"]), outputs[step])


# -------------------------------------------------------------------------------------------------- several passes


@pytest.mark.parametrize("is_looking", [False, True])
def test_micro_batches_are_one_step(is_looking: bool, begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    look: Any = None
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(3):
            loss = model(batch(2)).square().mean() / 3
            session.log({"micro": step})
            loss.backward()
        optimizer.step()
        if is_looking:
            look = model(batch(7))
        session.log({"step": step})
    del look
    run = reopen()
    check_steps(run, "step")
    check_steps(run, "micro", each=3)
    check_count(run)
    assert rows_seen(run) == [6] * STEPS


@pytest.mark.parametrize("is_looking", [False, True])
def test_several_passes_before_one_backward_pass_are_one_step(is_looking: bool, begin: Any, reopen: Any) -> None:
    """Siamese and contrastive training; gradients reach the second pass first."""
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    look: Any = None
    for step in range(STEPS):
        one = model(batch(2))
        session.log({"first": step})
        other = model(batch(3))
        session.log({"second": step})
        optimizer.zero_grad()
        (one.mean() - other.mean()).square().backward()
        optimizer.step()
        if is_looking:
            look = model(batch(7))
            session.log({"accuracy": step})
    del look
    run = reopen()
    check_steps(run, "first", "second", *(["accuracy"] if is_looking else []))
    check_count(run)
    assert rows_seen(run) == [5] * STEPS


def test_a_target_that_is_detached_is_a_part_of_the_step(begin: Any, reopen: Any) -> None:
    """After the pass that is trained; before it, it could be an extra forward pass."""
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        out = model(batch(2))
        target = model(batch(2)).detach()
        session.log({"loss": step})
        optimizer.zero_grad()
        (out - target).square().mean().backward()
        optimizer.step()
    run = reopen()
    check_steps(run, "loss")
    check_count(run)
    assert rows_seen(run) == [4] * STEPS


def test_a_gradient_penalty_is_a_part_of_the_step(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    look: Any = None
    for step in range(STEPS):
        x = batch(2).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        session.log({"penalty": step})
        loss = model(batch(3)).mean() + (slope.norm() - 1).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look = model(batch(7))
        session.log({"accuracy": step})
    del look
    run = reopen()
    check_steps(run, "penalty", "accuracy")
    check_count(run)
    assert rows_seen(run) == [5] * STEPS


def test_a_teacher_that_is_frozen_is_recorded_with_the_step(begin: Any, reopen: Any) -> None:
    teacher, student = net().requires_grad_(requires_grad=False), net()
    optimizer = sgd(student)
    session = begin()
    session.watch(student, optimizer, activations=True).watch(teacher, activations=True, prefix="teacher.")
    for step in range(STEPS):
        x = batch(2)
        loss = (student(x) - teacher(x)).square().mean() if step % 2 else (teacher(x) - student(x)).square().mean()
        session.log({"loss": step})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run = reopen()
    check_steps(run, "loss")
    check_count(run)
    assert rows_seen(run) == rows_seen(run, "teacher.2") == [2] * STEPS


# ------------------------------------------------------------------------------------------------------------ harmless


def test_training_is_bit_identical_and_no_graph_is_kept(begin: Any) -> None:
    class Token:
        """A hook that dies with the graph."""

        def __call__(self, grad: Tensor) -> None: ...

    def train(is_watched: bool) -> tuple[str, Any]:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        session = begin().watch(model, optimizer) if is_watched else None
        torch.manual_seed(1)
        graphs = []
        for step in range(STEPS):
            out = model(batch(4))
            out += 1  # an output that is written to
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
            look = model(batch(3)).relu_()
            if session is not None:
                session.log({"accuracy": look.mean() * 0 + step})
            token = Token()
            look.register_hook(token)
            graphs.append(weakref.ref(token))
            del token
        del out, look
        gc.collect()
        return digest((model.state_dict(), optimizer.state_dict(), torch.get_rng_state())), graphs

    bare, _ = train(is_watched=False)
    watched, graphs = train(is_watched=True)
    assert watched == bare
    assert [graph() for graph in graphs] == [None] * STEPS


def test_an_output_of_a_watched_model_can_be_saved(begin: Any, tmp_path: Any) -> None:
    """torch warns of hooks on a tensor that is saved, and here warnings are errors."""
    model = net()
    begin().watch(model, sgd(model), activations=True, activation_grads=True, inspect=sonde.every(1))
    torch.save(model(batch()), tmp_path / "out.pt")
