"""Losses are seen wherever they are called from, change nothing, and are put back."""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from sonde.probe.loss.functions import FunctionTap
from sonde.probe.loss.modules import LOSSES, LossCall, LossTap

HELD = F.cross_entropy
BEFORE = {name: (getattr(F, name), getattr(F, name).__code__, dict(getattr(F, name).__dict__)) for name in LOSSES}


class Sink:
    """What a loss tap saw."""

    def __init__(self) -> None:
        self.wants_loss = True
        self.calls: list[LossCall] = []
        self.errors: list[str] = []

    def loss_called(self, call: LossCall) -> None:
        self.calls.append(call)

    def on_error(self, where: str, error: Exception) -> None:
        self.errors.append(f"{where}: {error!r}")

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]


@pytest.fixture
def attach() -> Iterator[Callable[[], Sink]]:
    taps: list[tuple[LossTap, Sink]] = []

    def make() -> Sink:
        sink = Sink()
        sink.tap = LossTap(sink, sink.on_error)  # type: ignore[attr-defined]
        taps.append((sink.tap, sink))  # type: ignore[attr-defined]
        return sink

    yield make
    for tap, sink in taps:
        tap.detach()
        assert sink.errors == []
    for name, (function, code, attributes) in BEFORE.items():
        assert getattr(F, name) is function
        assert function.__code__ is code
        assert function.__dict__ == attributes


def logits() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()


LABELS = torch.tensor([0, 2, 1, 0])


def test_functions_modules_and_references_taken_before_are_all_seen(attach):
    sink = attach()
    F.cross_entropy(logits(), LABELS)
    nn.CrossEntropyLoss(reduction="sum", ignore_index=7)(logits(), LABELS)
    HELD(input=logits(), target=LABELS, reduction="none")
    assert [(call.name, call.reduction, call.ignore_index) for call in sink.calls] == [
        ("cross_entropy", "mean", -100),
        ("cross_entropy", "sum", 7),
        ("cross_entropy", "none", -100),
    ]


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_seen_and_gives_the_same_value(attach, name):
    x = torch.sigmoid(logits())
    target = LABELS if name in ("cross_entropy", "nll_loss") else torch.rand(4, 3)
    expected = getattr(F, name)(x, target, reduction="sum")
    sink = attach()
    assert torch.equal(getattr(F, name)(x, target, reduction="sum"), expected)
    assert sink.names == [name]
    assert sink.calls[0].target is target


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_losses_of_an_evaluation_are_seen_without_a_graph(attach, mode):
    sink = attach()
    with mode():
        F.cross_entropy(logits(), LABELS)
    assert [(call.name, call.result.grad_fn) for call in sink.calls] == [("cross_entropy", None)]


def test_what_has_no_values_is_not_seen(attach):
    sink = attach()
    torch.func.vmap(F.mse_loss)(torch.randn(3, 2), torch.randn(3, 2))
    torch.func.grad(lambda x: F.mse_loss(x, torch.zeros(2)))(torch.ones(2))
    F.mse_loss(torch.randn(2, device="meta"), torch.randn(2, device="meta"))
    sink.wants_loss = False
    F.cross_entropy(logits(), LABELS)
    assert sink.calls == []


def test_deprecated_arguments_leave_the_reduction_unknown(attach):
    sink = attach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        F.mse_loss(logits(), torch.zeros(4, 3), size_average=False)
    assert sink.calls[0].reduction == ""


def test_the_users_errors_are_the_users(attach):
    sink = attach()
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(logits(), LABELS[:2])
    assert sink.calls == []


def test_a_failing_sink_is_reported_and_the_loss_is_still_there(attach):
    sink = attach()
    sink.loss_called = None  # type: ignore[method-assign, assignment]
    assert F.cross_entropy(logits(), LABELS).isfinite()
    assert len(sink.errors) == 1
    sink.errors.clear()


def test_functions_stay_themselves_while_watched(attach):
    signature = inspect.signature(F.mse_loss)
    attach()
    assert F.cross_entropy is HELD
    assert pickle.loads(pickle.dumps(HELD)) is HELD
    assert inspect.signature(F.mse_loss) == signature
    assert "def mse_loss" in inspect.getsource(F.mse_loss)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torchscript_reads_the_original(attach):
    attach()
    scripted = torch.jit.script(nn.CrossEntropyLoss())
    assert torch.allclose(scripted(logits(), LABELS), nn.CrossEntropyLoss()(logits(), LABELS))


def test_subclasses_are_asked_for_the_function_they_know(attach):
    asked = []

    class Own(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    sink = attach()
    F.mse_loss(torch.ones(2).as_subclass(Own), torch.zeros(2))
    assert asked[0] is BEFORE["mse_loss"][0]
    assert sink.calls == []


def test_two_taps_share_one_replacement_and_the_last_restores_it(attach):
    first, second = attach(), attach()
    F.cross_entropy(logits(), LABELS)
    first.tap.detach()
    F.cross_entropy(logits(), LABELS)
    assert (len(first.calls), len(second.calls)) == (1, 2)


def test_somebody_elses_exchange_is_left_alone():
    def other(*args, **kwargs):
        return 7

    function = F.gaussian_nll_loss
    code = function.__code__
    tap = FunctionTap(F, ["gaussian_nll_loss"], lambda *call: None)
    function.__code__ = other.__code__
    tap.detach()
    try:
        assert F.gaussian_nll_loss() == 7
    finally:
        function.__code__ = code
        del function.__wrapped__


def test_builtins_are_not_touched():
    assert FunctionTap(torch, ["relu"], lambda *call: None).names == []


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("watched", ["before", "after"])
def test_compiled_losses_are_one_graph_without_breaks(attach, backend, watched):
    torch.compiler.reset()
    counters.clear()
    tap = attach() if watched == "before" else None

    def step(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(2 * x, y) + HELD(x, y) + nn.functional.mse_loss(x, x * 2)

    x = logits()
    expected = step(x, LABELS)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    tap = tap or attach()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            assert torch.equal(compiled(x, LABELS), expected)
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["graph_break"]) == {}
    torch.compiler.reset()
    counters.clear()
