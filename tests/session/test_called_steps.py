"""However a model is called, by its parts, compiled or inside a checkpoint, what is recorded is at its own step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from numbered import STEPS, batch, check_count, check_steps, net, rows_seen, sgd


def by_parts(model: Any, x: Tensor) -> Any:
    return model[2](model[1](model[0](x)))


def by_forward(model: Any, x: Tensor) -> Any:
    return model.forward(x)


def checkpointed(model: Any, x: Tensor) -> Any:
    return model[2](checkpoint(model[:2], x, use_reentrant=False))


def reentrant(model: Any, x: Tensor) -> Any:
    return checkpoint(model, x.requires_grad_(), use_reentrant=True)


def in_parallel(model: Any, x: Tensor) -> Any:
    return nn.DataParallel(model)(x)


@pytest.mark.parametrize("call", [by_parts, by_forward, checkpointed, in_parallel])
def test_a_model_called_in_another_way_has_the_same_steps(call: Any, begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    look: Any = None
    for step in range(STEPS):
        loss = call(model, batch(2)).square().mean()
        session.log({"loss": step})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look = call(model, batch(5))
        session.log({"accuracy": step})
    del look
    run = reopen()
    check_steps(run, "loss", "accuracy")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS


def test_a_reentrant_checkpoint_of_the_whole_model_is_a_part_of_the_step(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        loss = reentrant(model, batch(2)).square().mean()
        session.log({"loss": step})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log({"after": step})
    run = reopen()
    check_steps(run, "loss", "after")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS


@pytest.mark.parametrize("is_compiled_first", [False, True])
def test_a_compiled_model_has_the_same_steps(is_compiled_first: bool, begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    compiled = torch.compile(model, backend="eager", dynamic=True)
    session = begin().watch(compiled if is_compiled_first else model, optimizer, activations=True)
    look: Any = None
    for step in range(STEPS):
        loss = compiled(batch(2)).square().mean()
        session.log({"loss": step})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        look = compiled(batch(5))
        session.log({"accuracy": step})
    del look
    run = reopen()
    check_steps(run, "loss", "accuracy")
    check_count(run)
    assert rows_seen(run, "model") == [2] * STEPS


def test_an_output_without_tensors_is_taken_for_a_part_of_the_step(begin: Any, reopen: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Callable[[], Tensor]:
            out = self.inner(x)
            return lambda: out

    model = Odd()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        loss = model(batch(2))().square().mean()
        session.log({"loss": step})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log({"after": step})
    run = reopen()
    check_steps(run, "loss", "after")
    check_count(run, site="inner.2.bias")
    assert rows_seen(run, "inner.2") == [2] * STEPS


def test_gradients_that_no_backward_pass_made_are_a_step(begin: Any, reopen: Any) -> None:
    """Training without gradients, by differences of the loss."""
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        loss = model(batch(2)).square().mean()
        session.log({"loss": step})
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * loss.detach()
        optimizer.step()
        session.log({"after": step})
    run = reopen()
    check_steps(run, "loss", "after")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS
