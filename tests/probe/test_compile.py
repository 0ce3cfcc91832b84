"""torch.compile does not notice us: one graph, no breaks, no recompiles, and the boundary is still seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

# torch's own compiler asks every tensor for its gradient, which warns; it hides the warning, but not from pytest.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 1))


def train(called, model: nn.Module, steps: int = 20) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = called(torch.randn(16, 4, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("watched", ["before", "after"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_one_graph_no_breaks_no_recompiles_and_the_same_losses(watch, follow, watched, fullgraph):
    bare = net()
    expected = train(torch.compile(bare, backend="aot_eager"), bare)
    torch.compiler.reset()
    counters.clear()
    model = net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=fullgraph) if watched == "after" else None
    sink, steps = watch(model), follow(model)
    compiled = compiled or torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert train(compiled, model) == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["graph_break"]) == {}
    assert len(steps.before) == 20
    # Inside the graph nothing is seen; the compiled wrapper is the boundary of the model.
    assert sink.names == ["model"] * 20


def test_compiled_model_may_be_watched_itself(watch):
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    sink = watch(compiled)
    train(compiled, model, 3)
    assert sink.names == ["model"] * 3


def test_compiled_block_is_seen_at_its_boundary(watch):
    model = net()
    model[2] = torch.compile(model[2], backend="aot_eager")
    sink = watch(model)
    train(model, model, 2)
    assert sink.names == ["0", "1", "2", "3", "model"] * 2


def test_explain_finds_no_break(watch):
    model = net()
    watch(model)
    explained = torch._dynamo.explain(model)(torch.randn(16, 4))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x) * 2


def test_model_compiled_in_place(watch):
    model = Wrapped()
    model.compile(backend="aot_eager", fullgraph=True)
    watch(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(model, model, 5)
    assert counters["stats"]["unique_graphs"] == 1


def test_detaching_between_compiled_steps_harms_nothing(watch):
    model = net()
    compiled = torch.compile(model, backend="aot_eager")
    sink = watch(model)
    train(compiled, model, 2)
    sink.tap.detach()
    train(compiled, model, 2)
    assert sink.names == ["model"] * 2


def test_clipping_inside_a_compiled_function(follow):
    model = net()
    steps = follow(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def clip() -> torch.Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    model(torch.randn(16, 4)).sum().backward()
    clip()
    optimizer.step()
    assert sum(p.grad.square().sum() for p in model.parameters()).sqrt() <= 0.011
    assert len(steps.before) == 1


@pytest.mark.slow
def test_inductor(watch, follow):
    bare = net()
    expected = train(torch.compile(bare), bare)
    torch.compiler.reset()
    counters.clear()
    model = net()
    sink, steps = watch(model), follow(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert train(torch.compile(model, fullgraph=True), model) == expected
    assert counters["stats"]["unique_graphs"] == 1
    assert sink.names == ["model"] * 20
    assert len(steps.after) == 20
