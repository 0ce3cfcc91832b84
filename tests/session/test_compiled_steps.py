"""Optimizer steps in compiled code are counted and measured like all others; where none can be seen, a warning says so.

Each value that a loop logs is the number of the step it belongs to: what was recorded is right where the two are equal.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import sonde
from numbered import STEPS, batch, check_count, check_steps, net
from sonde.probe.optimizer import compiled_steps
from sonde.probe.optimizer import hooks as optimizer_hooks

# torch's own compiler asks every tensor for its gradient, which warns; it hides the warning, but not from pytest.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)
Adam = functools.partial(torch.optim.Adam, lr=0.01)
AdamW = functools.partial(torch.optim.AdamW, lr=0.01)
Single = functools.partial(torch.optim.AdamW, lr=0.01, foreach=False)
KINDS = ("param/*/sum", "grad/*/sum", "update/*/sum", "optim/*/sum")


class Plain(torch.optim.Optimizer):
    """An optimizer without torch's own graph breaks: all of its step fits into one graph."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


# ------------------------------------------------------------------------------------------------------ ways to train

Train = Callable[[Tensor], Tensor]


def eager(model: Any, optimizer: Any, backend: str) -> Train:
    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def compiled_step(model: Any, optimizer: Any, backend: str) -> Train:
    step = torch.compile(optimizer.step, backend=backend)

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step()
        return loss.detach()

    return train


def compiled_function(model: Any, optimizer: Any, backend: str) -> Train:
    @torch.compile(backend=backend)
    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()

    def train(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        step()
        return loss.detach()

    return train


def compiled_train_step(model: Any, optimizer: Any, backend: str) -> Train:
    return torch.compile(eager(model, optimizer, backend), backend=backend)


def one_graph(model: Any, optimizer: Any, backend: str) -> Train:
    """Forward pass, gradients and step in a single graph."""
    parameters = list(model.parameters())

    @torch.compile(backend=backend, fullgraph=True)
    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = grad
        optimizer.step()
        return loss.detach()

    return train


WAYS = [compiled_step, compiled_function, compiled_train_step]


def slow_pairs() -> list[Any]:
    optimizers = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "single": Single}
    pairs = [(way, name) for way in WAYS for name in optimizers]
    return [
        pytest.param(way, optimizers[name], id=f"{way.__name__}-{name}", marks=pytest.mark.slow) for way, name in pairs
    ]


def run_steps(way: Any, optimizer_of: Any, *, session: Any = None, backend: str = "eager") -> tuple[Any, list[float]]:
    model = net()
    optimizer = optimizer_of(model.parameters())
    if session is not None:
        session.watch(model, optimizer)
    train = way(model, optimizer, backend)
    losses = []
    with torch._dynamo.config.patch(trace_autograd_ops=True) if way is one_graph else contextlib.nullcontext():
        for step in range(STEPS):
            losses.append(float(train(torch.full((2, 3), 1.0 + step))))
            if session is not None:
                assert session.step_number == step
                session.log({"number": step, "loss": losses[-1]})
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in (*model.parameters(), *state)], losses


def recorded(run: Any) -> dict[str, Any]:
    return {kind: run.stats(kind).to_pydict() for kind in KINDS}


# ------------------------------------------------------------------------------------------- counted, and at its step


@pytest.mark.parametrize(("way", "optimizer_of"), [(compiled_step, SGD), (compiled_train_step, Adam), *slow_pairs()])
def test_a_compiled_step_is_recorded_like_any_other(way: Any, optimizer_of: Any, begin: Any, reopen: Any) -> None:
    _, losses = run_steps(way, optimizer_of, session=begin())
    run = reopen()
    check_steps(run, "number")
    check_count(run)
    assert run.scalars("loss")["value"].to_pylist() == losses
    assert run.scalars("loss")["step"].to_pylist() == list(range(STEPS))
    compiled = recorded(run)
    run_steps(eager, optimizer_of, session=begin())
    expected = recorded(reopen())
    for kind in KINDS:
        assert compiled[kind]["step"] == expected[kind]["step"], kind
        assert compiled[kind]["site"] == expected[kind]["site"], kind
        assert compiled[kind]["value"] == pytest.approx(expected[kind]["value"], rel=1e-4, abs=1e-6), kind


@pytest.mark.parametrize(
    ("way", "optimizer_of"), [(compiled_step, SGD), (one_graph, Plain), (compiled_step, Plain), *slow_pairs()]
)
def test_sonde_adds_no_graph_and_no_graph_break(way: Any, optimizer_of: Any, begin: Any) -> None:
    found = []
    for session in (None, begin()):
        torch.compiler.reset()
        counters.clear()
        state, losses = run_steps(way, optimizer_of, session=session)
        breaks = sum(counters["graph_break"].values())
        found.append((breaks, dict(counters["stats"]), losses, [value.tolist() for value in state]))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "optimizer_of"), [(compiled_step, AdamW), (compiled_train_step, SGD), (one_graph, Plain)]
)
def test_training_is_the_same_to_the_bit_with_inductor(way: Any, optimizer_of: Any, begin: Any, reopen: Any) -> None:
    bare, expected = run_steps(way, optimizer_of, backend="inductor")
    torch.compiler.reset()
    watched, losses = run_steps(way, optimizer_of, session=begin(), backend="inductor")
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(bare, watched, strict=True))
    run = reopen()
    check_steps(run, "number")
    assert run.last_step == STEPS - 1


def test_a_step_in_one_graph_is_counted_and_what_is_missing_is_said(begin: Any, reopen: Any, capsys: Any) -> None:
    run_steps(one_graph, Plain, session=begin())
    run = reopen()
    check_steps(run, "number")
    assert run.last_step == STEPS - 1
    assert run.stats("param/2.bias/n")["step"].to_pylist() == list(range(STEPS))
    assert run.stats("grad/2.bias/n")["step"].to_pylist() == []
    assert run.stats("update/2.bias/n")["step"].to_pylist() == []
    assert len(run.warnings) == 1
    assert "gradients and updates are not" in run.warnings[0]
    assert capsys.readouterr().err.count("inside a single graph") == 1


def test_parameters_of_a_step_in_one_graph_are_those_after_it(begin: Any, reopen: Any) -> None:
    after, _ = run_steps(one_graph, Plain, session=begin())
    last = reopen().stats("param/2.bias/sum")["value"].to_pylist()[-1]
    assert last == pytest.approx(float(after[3].sum()))


def test_code_compiled_before_the_model_is_watched_is_followed(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    train = compiled_step(model, optimizer, "eager")
    train(batch())
    session = begin().watch(model, optimizer)
    for step in range(STEPS):
        train(batch())
        session.log({"number": step})
    run = reopen()
    check_steps(run, "number")
    check_count(run)
    train(batch())  # and after the session


def test_eager_and_compiled_steps_may_alternate(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    ways = [eager(model, optimizer, "eager"), compiled_step(model, optimizer, "eager")]
    session = begin().watch(model, optimizer)
    for step in range(STEPS):
        ways[step % 2](batch())
        session.log({"number": step})
    run = reopen()
    check_steps(run, "number")
    check_count(run)


def test_two_compiled_optimizers_make_one_step_together(begin: Any, reopen: Any) -> None:
    model = net()
    optimizers = [SGD(model[0].parameters()), Adam(model[2].parameters())]
    steps = [torch.compile(optimizer.step, backend="eager") for optimizer in optimizers]
    session = begin().watch(model, optimizers)
    for number in range(STEPS):
        model.zero_grad()
        model(batch()).square().mean().backward()
        for step in steps:
            step()
        session.log({"number": number})
    run = reopen()
    check_steps(run, "number")
    check_count(run)


def test_an_optimizer_that_was_not_named_is_followed_in_compiled_code(begin: Any, reopen: Any) -> None:
    model = net()
    session = begin().watch(model)
    train = compiled_train_step(model, AdamW(model.parameters()), "eager")
    for step in range(STEPS):
        train(batch())
        session.log({"number": step})
    run = reopen()
    check_steps(run, "number")
    check_count(run)


def test_a_compiled_step_under_a_scaler_is_counted_once(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    session = begin().watch(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        session.log({"number": step})
    run = reopen()
    check_steps(run, "number")
    assert run.last_step == STEPS - 1


def test_several_steps_in_one_graph_are_all_counted(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = Plain(model.parameters())

    @torch.compile(backend="eager", fullgraph=True)
    def twice() -> None:
        optimizer.step()
        optimizer.step()

    session = begin().watch(model, optimizer)
    for round_ in range(3):
        model(batch()).square().mean().backward()
        twice()
        assert session.step_number == 2 * round_ + 1
    assert reopen().last_step == 5


def test_a_snapshot_of_a_step_in_one_graph_has_no_gradients_of_another_step(begin: Any) -> None:
    model = net()
    optimizer = Plain(model.parameters())
    plan = sonde.Snapshots(store="memory", when=sonde.every(1), kinds=("param", "grad"))
    session = begin().watch(model, optimizer, snapshots=plan)
    train = one_graph(model, optimizer, "eager")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for _ in range(3):
            train(batch())
    assert session.flush(30)
    store = session.steps.snapshots._writer._store
    assert store.steps() == [0, 1, 2]
    assert {name.split("/")[0] for step in store.steps() for name in store.read(step).tensors} == {"param"}


def test_sonde_can_be_left_without_a_trace(begin: Any) -> None:
    run_steps(compiled_step, SGD, session=begin())
    sonde.finish()
    assert compiled_steps._followers == []
    assert not torch._dynamo.config.reorderable_logging_functions


# --------------------------------------------------------------------------------------------------- where none is seen


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler whose internals are not those we know."""

    def fail(*_: Any) -> None:
        raise AttributeError("another version")

    monkeypatch.setattr(compiled_steps, "_leave", fail)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("way", [compiled_step, pytest.param(compiled_train_step, marks=pytest.mark.slow)])
def test_a_compiler_that_is_not_known_is_warned_of_once(way: Any, begin: Any, reopen: Any, capsys: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    begin(verbose=True).watch(model, optimizer)
    train = way(model, optimizer, "eager")
    for _ in range(STEPS):
        train(batch())
    run = reopen()
    assert len(run.warnings) == 1
    assert "sonde.step()" in run.warnings[0]
    told = capsys.readouterr().err
    assert told.count("cannot see it") == 1
    assert "steps were not counted" in told


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("way", [compiled_step, pytest.param(compiled_train_step, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_eager", [0, 2])
def test_the_user_may_end_steps_that_are_not_seen(
    way: Any, num_eager: int, begin: Any, reopen: Any, capsys: Any
) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    session = begin(verbose=True).watch(model, optimizer)
    first, then = eager(model, optimizer, "eager"), way(model, optimizer, "eager")
    for step in range(STEPS):
        (first if step < num_eager else then)(batch())
        session.log({"number": step})
        session.step()
    run = reopen()
    check_steps(run, "number")
    assert run.last_step == STEPS - 1
    assert run.stats("param/2.bias/n")["step"].to_pylist() == list(range(STEPS))
    assert f"Finished: {STEPS} steps." in capsys.readouterr().err


@pytest.mark.parametrize("is_data", [False, True])
def test_updates_written_by_hand_are_warned_of(is_data: bool, begin: Any, reopen: Any, capsys: Any) -> None:
    model = net()
    session = begin(verbose=True).watch(model)
    for _ in range(STEPS):
        update_by_hand(model, is_data=is_data)
        session.log({"loss": 1.0})
    run = reopen()
    assert len(run.warnings) == 1
    assert "sonde.step()" in run.warnings[0]
    assert "steps were not counted" in capsys.readouterr().err


def test_an_optimizer_that_is_not_one_of_torchs_is_warned_of(begin: Any, reopen: Any) -> None:
    from torch.distributed.optim import _FunctionalSGD as Functional  # type: ignore[attr-defined]

    model = net()
    parameters = list(model.parameters())
    optimizer = Functional(parameters, lr=0.01)
    begin().watch(model)
    for _ in range(STEPS):
        model.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step([p.grad for p in parameters])
    assert len(reopen().warnings) == 1


def test_updates_written_by_hand_are_counted_by_the_user(begin: Any, reopen: Any, capsys: Any) -> None:
    model = net()
    session = begin(verbose=True).watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        update_by_hand(model)
        session.log({"number": step})
        session.step()
    run = reopen()
    check_steps(run, "number")
    check_count(run)
    assert f"Finished: {STEPS} steps." in capsys.readouterr().err


def update_by_hand(model: nn.Module, *, is_data: bool = False) -> None:
    model.zero_grad()
    model(batch()).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            (p.data if is_data else p).sub_(0.01 * p.grad)  # type: ignore[operator]


def load_checkpoint(model: nn.Module, average: nn.Module) -> None:
    model.load_state_dict(average.state_dict())


def copy_in(model: nn.Module, average: nn.Module) -> None:
    with torch.no_grad():
        for p, other in zip(model.parameters(), average.parameters(), strict=True):
            p.copy_(other)


def initialize(model: nn.Module, average: nn.Module) -> None:
    for p in model.parameters():
        nn.init.normal_(p)


def move(model: nn.Module, average: nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


def clip_weights(model: nn.Module, average: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.01, 0.01)


EDITS = [load_checkpoint, copy_in, initialize, move, clip_weights]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("accumulated", [1, 4])
def test_weights_changed_between_steps_are_no_steps(edit: Any, accumulated: int, begin: Any, reopen: Any) -> None:
    model, average = net(), net()
    session = begin().watch(model)
    edit(model, average)
    optimizer = SGD(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(accumulated):
            model(batch()).square().mean().backward()
        optimizer.step()
        session.log({"number": step})
        edit(model, average)
    run = reopen()
    check_steps(run, "number")
    check_count(run)


@pytest.mark.parametrize("edit", EDITS)
def test_weights_changed_without_any_training_are_no_steps(edit: Any, begin: Any, reopen: Any) -> None:
    model, average = net(), net()
    begin().watch(model)
    for _ in range(STEPS):
        model(batch())
        edit(model, average)
    assert reopen().warnings == []


def test_weights_that_the_forward_pass_changes_are_no_steps(begin: Any, reopen: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    words = nn.Sequential(nn.Embedding(9, 3, max_norm=0.1), model)
    session = begin().watch(words)
    optimizer = SGD(words.parameters())
    for _ in range(8):  # accumulated before the first step
        words(torch.arange(9)).square().mean().backward()
    optimizer.step()
    assert session.step_number == 0
    assert reopen().warnings == []


def test_a_run_that_ends_in_its_first_step_is_not_warned_of(begin: Any, reopen: Any) -> None:
    model = net()
    session = begin().watch(model)
    for _ in range(STEPS):
        model(batch()).square().mean().backward()
    session.finish("interrupted")
    assert reopen().warnings == []


# --------------------------------------------------------------------------------------------------------- CUDA graphs


class FakeGraph:
    """A CUDA graph as far as we see it: what is captured runs at each replay, without Python."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        self.run()


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, Callable[[], None]], FakeGraph]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)

    def capture(optimizer: Any, run: Callable[[], None]) -> FakeGraph:
        graph = FakeGraph(run)
        with monkeypatch.context() as patched:
            patched.setattr(optimizer_hooks, "is_capturing", lambda: True)
            optimizer.step()
        graph.capture_end()
        return graph

    return capture


@pytest.mark.parametrize("num_eager", [0, 2])
def test_replays_of_a_captured_step_are_counted(num_eager: int, capture: Any, begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    session = begin().watch(model, optimizer)
    original = FakeGraph.replay
    train = eager(model, optimizer, "")
    graph = None
    for step in range(STEPS):
        if step < num_eager:
            train(batch())
        else:
            graph = graph or capture(optimizer, lambda: model[2].bias.data.add_(1.0))
            graph.replay()
        session.log({"number": step})
    other = FakeGraph(lambda: None)
    other.replay()  # nothing of ours is in it
    run = reopen()
    check_steps(run, "number")
    assert run.last_step == STEPS - 1
    assert run.stats("param/2.bias/n")["step"].to_pylist() == list(range(STEPS))
    assert run.stats("grad/2.bias/n")["step"].to_pylist() == list(range(num_eager))
    assert len(run.warnings) == 1
    assert FakeGraph.replay is original


def test_a_captured_step_that_cannot_be_followed_is_warned_of(
    capture: Any, begin: Any, reopen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    session = begin().watch(model, optimizer)
    train = eager(model, optimizer, "")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    for step in range(2):
        train(batch())
        session.log({"number": step})
    graph = capture(optimizer, lambda: None)
    for step in range(2, STEPS):
        graph.replay()
        session.log({"number": step})
        session.step()
    run = reopen()
    check_steps(run, "number")
    assert len(run.warnings) == 1
    assert "a CUDA graph" in run.warnings[0]
