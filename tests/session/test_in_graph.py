"""Activations inside a compiled region: one graph, no recompilation, and the numbers of the eager model."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

import sonde


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(model, call, session, steps=5) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.watch(model, optimizer, activations="in-graph", inspect=False)
    seen = []
    for step in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            seen.append(torch.tanh(model[0](x)).norm())
        call(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_one_graph_and_the_eager_numbers(begin, reopen):
    model, session = make(), begin()
    counter = CompileCounter()
    seen = train(model, torch.compile(model, backend=counter, fullgraph=True), session)
    run = reopen()
    assert counter.frame_count == 1
    found = run.stats("act/1/norm").column("value").to_pylist()
    np.testing.assert_allclose(found, [x.item() for x in seen], rtol=1e-5)


def test_eager_calls_are_recorded_once(begin, reopen):
    model, session = make(), begin()
    train(model, model, session)
    assert reopen().stats("act/1/n").column("value").to_pylist() == [32.0] * 5


def test_model_can_be_copied_and_saved(begin):
    model, session = make(), begin()
    session.watch(model, activations="in-graph")
    torch.save(copy.deepcopy(model), io.BytesIO())
    torch.save(model, io.BytesIO())
    sonde.finish()
    assert not any(module._forward_hooks for module in model.modules())


def test_other_words_are_not_a_schedule(begin):
    with pytest.raises(ValueError, match="in graph"):
        begin().watch(make(), activations="in graph")
