"""Functions called inside a watched model are seen while a tap is open, and torch is untouched at all other times."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from sonde.probe.loss.functional import TARGETS, CallTap
from sonde.probe.model import ModelNames


class Seen:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.errors: list[str] = []
        self.fails = False

    def function_called(self, name, place, args, kwargs, out) -> None:
        assert not torch.is_grad_enabled()
        self.calls.append((place.name, name))
        torch.softmax(torch.zeros(3), 0)  # what we compute ourselves is not seen
        if self.fails:
            raise RuntimeError("ours")

    def on_error(self, where: str, error: Exception) -> None:
        self.errors.append(f"{where}: {error}")


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.relu(x)).sigmoid()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.softmax = nn.Softmax(-1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.softmax(self.inner(x)) + F.softmax(x, dim=-1) + x.softmax(-1)
        x = self.attention(x, x, x)[0] + self.attention(x, x, x, need_weights=False)[0]
        return F.scaled_dot_product_attention(x, x, x)


EXPECTED = [
    ("inner", "relu"), ("inner", "tanh"), ("inner", "sigmoid"), ("model", "softmax"), ("model", "softmax"),
    ("model", "softmax"), ("attention", "softmax"), ("attention", "attention"), ("model", "attention"),
]  # fmt: skip


@pytest.fixture
def tapped():
    made = []

    def make(model: nn.Module, **options) -> tuple[CallTap, Seen]:
        seen = Seen()
        made.append(CallTap(ModelNames(model), seen, seen.on_error, **options))
        return made[-1], seen

    before = [vars(holder).get(name) for holder, name, _ in TARGETS]
    yield make
    for tap in made:
        tap.close()
    assert [vars(holder).get(name) for holder, name, _ in TARGETS] == before


def test_each_call_once_with_the_innermost_module(tapped):
    model = Model()
    tap, seen = tapped(model)
    tap.open()
    model(torch.randn(2, 3, 4))
    tap.close()
    assert seen.calls == EXPECTED
    assert seen.errors == []


def test_only_functions_that_a_tap_asks_for_are_replaced(tapped):
    before = {name: getattr(torch, name) for name in ("relu", "tanh", "clamp", "detach")}

    def replaced() -> set[str]:
        return {name for name, function in before.items() if getattr(torch, name) is not function}

    model = Model()
    one, seen = tapped(model, only=("relu",))
    other, _ = tapped(Model(), only=("relu", "clamp"))
    one.open()
    assert replaced() == {"relu"}
    other.open()
    assert replaced() == {"relu", "clamp"}
    model(torch.randn(2, 3, 4))
    assert seen.calls == [("inner", "relu")]
    other.close()
    one.close()
    assert replaced() == set()


def test_nothing_is_replaced_before_open_and_after_close(tapped):
    before = F.relu, torch.softmax, F.scaled_dot_product_attention
    tap, seen = tapped(Model())
    assert (F.relu, torch.softmax, F.scaled_dot_product_attention) == before
    tap.open()
    assert before[0] is not F.relu
    tap.close()
    assert (F.relu, torch.softmax, F.scaled_dot_product_attention) == before
    assert "softmax" not in vars(Tensor)
    Model()(torch.randn(2, 3, 4))
    assert seen.calls == []


def test_other_models_are_not_seen_and_two_taps_share_one_replacement(tapped):
    first, second = Model(), Model()
    (tap, seen), (other_tap, other_seen) = tapped(first), tapped(second)
    tap.open()
    other_tap.open()
    first(torch.randn(2, 3, 4))
    tap.close()
    second(torch.randn(2, 3, 4))
    other_tap.close()
    assert seen.calls == other_seen.calls == EXPECTED


def test_our_failure_does_not_reach_the_model(tapped):
    model = Model()
    x = torch.randn(2, 3, 4)
    expected = model(x)
    tap, seen = tapped(model)
    seen.fails = True
    tap.open()
    assert torch.equal(model(x), expected)
    assert len(seen.errors) == len(EXPECTED)


def test_an_error_of_the_users_stays_theirs(tapped):
    tap, _ = tapped(Model())
    tap.open()
    with pytest.raises(TypeError):
        F.relu("no tensor")
    assert torch.equal(F.relu(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_somebody_elses_replacement_stays(tapped):
    tap, _ = tapped(Model())
    tap.open()
    ours, theirs = F.relu, lambda x, inplace=False: x
    F.relu = theirs
    try:
        tap.close()
        assert F.relu is theirs
    finally:
        F.relu = ours.__wrapped__


def test_a_transformer_layer_can_be_pickled_between_passes(tapped):
    model = nn.TransformerEncoderLayer(4, 2, 8)  # holds F.relu
    tap, _ = tapped(model)
    tap.open()
    model(torch.randn(3, 2, 4))
    tap.close()
    assert pickle.loads(pickle.dumps(model)).activation is F.relu


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_functions_compiled_while_open_are_one_whole_graph(tapped):
    tap, seen = tapped(Inner())
    torch.compiler.reset()
    counters.clear()
    tap.open()
    compiled = torch.compile(lambda x: F.softmax(torch.tanh(F.relu(x)), -1), backend="eager", fullgraph=True)
    x = torch.randn(3, 4)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            compiled(x)
    assert dict(counters["graph_break"]) == {}
    assert seen.calls == []
    tap.close()
    torch.compiler.reset()
    counters.clear()


def test_a_tap_may_ask_for_some_functions_only():
    model, seen = Model(), Seen()
    tap = CallTap(ModelNames(model), seen, seen.on_error, only=("relu", "attention"))
    tap.open()
    model(torch.randn(2, 3, 4))
    tap.close()
    assert seen.calls == [call for call in EXPECTED if call[1] in ("relu", "attention")]
    assert seen.errors == []
