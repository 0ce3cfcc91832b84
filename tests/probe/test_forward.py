"""Activations and their gradients: seen once, in training only, and never where there are no real values."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sonde.probe.forward import ForwardTap
from sonde.probe.guards import protected, quiet
from sonde.probe.model import ModelNames
from sonde.reduce.torch import Reducer, resolve_all


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)
        return self.head(x)


def test_each_module_is_seen_with_its_output_and_gradient(watch):
    model = mlp()
    sink = watch(model)
    x = torch.randn(3, 4)
    outputs = [model[0](x), model[1](model[0](x)), model(x)]
    sink.activations.clear()
    sink.grads.clear()
    model(x).sum().backward()
    assert sink.names == ["0", "1", "2", "model"]
    for (_, seen), wanted in zip(sink.activations, [*outputs, outputs[-1]], strict=True):
        torch.testing.assert_close(seen, wanted.detach(), rtol=0, atol=0)
    assert sorted(sink.grad_names) == ["0", "1", "2", "model"]
    assert torch.equal(dict(sink.grads)["model"], torch.ones(3, 2))


def test_a_layer_that_was_replaced_is_seen_when_it_is_first_called(watch):
    model = mlp()
    sink = watch(model)
    sink.tap.entered()
    model[2] = nn.Linear(8, 3)
    model(torch.randn(3, 4))
    assert [(name, tuple(tensor.shape)) for name, tensor in sink.activations][-2:] == [("2", (3, 3)), ("model", (3, 3))]


class MakesModules(nn.Module):
    """As some do: `nn.Dropout()(x)` in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.Tanh()(self.first(x))


def test_modules_made_in_every_pass_do_not_have_the_names_read_every_time(watch):
    model = MakesModules()
    sink = watch(model)
    before = sink.tap.names.version
    for _ in range(1000):
        sink.tap.entered()
        model(torch.randn(1, 4))
    assert sink.tap.names.version - before == 10


def test_an_idle_sink_hears_of_a_module_the_first_time_and_of_the_model_always(watch):
    model = mlp()
    sink = watch(model)
    sink.is_idle = True
    for _ in range(3):
        model(torch.randn(1, 4))
    assert sink.num_forwards == 4 + 1 + 1
    sink.is_idle = False
    sink.activations.clear()
    model(torch.randn(1, 4))
    assert sink.names == ["0", "1", "2", "model"]


def test_other_models_are_not_seen(watch):
    model, other = mlp(), mlp()
    sink = watch(model)
    other(torch.randn(1, 4))
    assert sink.names == []
    assert sink.num_forwards == 0


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_are_not_recorded(watch, mode, off):
    model = getattr(mlp(), mode)()
    sink = watch(model)
    with off():
        model(torch.randn(1, 4))
    assert (sink.names, sink.num_forwards) == ([], 0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_modules_fire_once_per_step(watch, reentrant):
    model = Checkpointed(reentrant)
    sink = watch(model)
    for _ in range(2):
        sink.activations.clear()
        model(torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert sorted(sink.names) == sorted(["first", "second.0", "second.1", "second", "head", "model"])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoint_in_evaluation_is_not_recorded(watch):
    model = Checkpointed(True).eval()
    sink = watch(model)
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert sink.names == []


def test_checkpoint_of_a_checkpoint_fires_once(watch):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.Sequential(nn.Linear(4, 4), inner)
    sink = watch(model)
    x = torch.randn(2, 4, requires_grad=True)
    outer = checkpoint(lambda v: checkpoint(model, v, use_reentrant=False), x, use_reentrant=False)
    outer.sum().backward()
    assert sorted(sink.names) == ["0", "1", "1.0", "1.1", "model"]


def test_vmap_and_functional_gradients_are_looked_away_from(watch):
    model = mlp()
    sink = watch(model)
    params = dict(model.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).sum()

    x = torch.randn(5, 4)
    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    assert grads["0.weight"].shape == (5, 8, 4)
    torch.func.vmap(model)(x)
    torch.func.jvp(lambda v: model(v), (x,), (x,))
    assert (sink.names, sink.num_forwards) == ([], 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_jit_trace_is_clean(watch):
    model = mlp()

    def operations() -> list[str]:
        graph = torch.jit.trace(model, torch.randn(1, 4), check_trace=False).inlined_graph
        return [node.kind() for node in graph.nodes()]

    bare = operations()
    sink = watch(model)
    assert operations() == bare
    assert sink.names == []


def test_export_is_clean(watch):
    model = mlp()
    bare = torch.export.export(model, (torch.randn(2, 4),)).graph
    sink = watch(model)
    watched = torch.export.export(model, (torch.randn(2, 4),)).graph
    assert [node.target for node in watched.nodes] == [node.target for node in bare.nodes]
    assert sink.names == []


def test_symbolic_trace_is_clean(watch):
    model = mlp()
    sink = watch(model)
    graph = torch.fx.symbolic_trace(model).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "call_module", "call_module", "output"]
    assert sink.names == []


def test_fake_and_meta_forwards_have_no_values_to_record(watch):
    with FakeTensorMode():
        fake = mlp()
        sink = watch(fake)
        fake(torch.randn(2, 4))
    assert sink.names == []
    meta = mlp().to("meta")
    sink = watch(meta)
    meta(torch.randn(2, 4, device="meta")).sum().backward()
    assert (sink.names, sink.grad_names) == ([], [])


class CountsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class CountsDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Reducing:
    """A sink that really computes."""

    wants_activations, wants_activation_grads, is_idle = True, False, False

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.reducer = Reducer()
        self.errors: list[object] = []

    def forward_seen(self, place, output): ...

    def module_called(self, place, module, args, output) -> None: ...

    def activation(self, place, suffix, tensor) -> None:
        key = self.keys.setdefault(place.name, len(self.keys))
        self.reducer.add(key, tensor, histogram=True)

    def activation_grad(self, place, suffix, tensor) -> None: ...


@pytest.fixture
def reducing():
    taps = []

    def attach(model: nn.Module) -> Reducing:
        sink = Reducing()
        taps.append((ForwardTap(ModelNames(model), sink, lambda *what: sink.errors.append(what)), sink))
        return sink

    yield attach
    for tap, sink in taps:
        tap.detach()
        assert sink.errors == []


@pytest.mark.parametrize("mode", [CountsFunctions, CountsDispatch])
def test_a_mode_of_the_user_does_not_see_our_operations(reducing, mode):
    model, x = mlp(), torch.randn(600, 4)
    with mode() as bare:
        model(x)
    sink = reducing(model)
    with mode() as watched:
        model(x)
    assert watched.seen == bare.seen
    assert len(resolve_all(sink.reducer.take())[0]) == 4


def test_selective_checkpoint_that_saves_everything_recomputes_what_it_saved(reducing):
    def gradient(sink_for) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Flatten(1), nn.Unflatten(1, (2, 3)), nn.Flatten(1), nn.Tanh())
        sink_for(model)
        x = torch.randn(300, 6, requires_grad=True)
        save_all = lambda: create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_SAVE)
        checkpoint(model, x, use_reentrant=False, context_fn=save_all).square().sum().backward()
        return x.grad

    assert torch.equal(gradient(reducing), gradient(lambda model: None))


def test_module_that_returns_its_parameter_keeps_no_hook(watch):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> torch.Tensor:
            return self.weight

    model = Table()
    sink = watch(model)
    for _ in range(3):
        model().sum().backward()
    assert sink.names == ["model"] * 3
    assert not model.weight._backward_hooks


def test_input_that_passes_through_keeps_no_hook(watch):
    model = nn.Identity()
    watch(model)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        model(x)
    assert not x._backward_hooks


def test_in_place_operation_after_a_module_does_not_change_what_it_returned(watch):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    sink = watch(model)
    x = torch.randn(50, 4)
    wanted = nn.functional.linear(x, model[0].weight, model[0].bias).detach()
    model(x).sum().backward()
    assert torch.equal(dict(sink.activations)["0"], wanted)
    assert torch.equal(dict(sink.grads)["0"], (wanted > 0).float())


def test_module_called_several_times_is_seen_each_time(watch):
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer, layer)
    sink = watch(model)
    model(torch.randn(1, 4))
    assert sink.names == ["0", "0", "0", "model"]


def test_backward_after_detach_reports_nothing(watch):
    model = mlp()
    sink = watch(model)
    loss = model(torch.randn(3, 4)).sum()
    sink.tap.detach()
    loss.backward()
    assert sink.grads == []
    model(torch.randn(3, 4))
    assert len(sink.names) == 4


def test_two_taps_see_their_own_models_and_go_in_any_order(watch):
    filters = list(warnings.filters)
    a, b = mlp(), mlp()
    first, second = watch(a), watch(b)
    first.tap.detach()
    b(torch.randn(1, 4))
    assert first.names == []
    assert len(second.names) == 4
    with warnings.catch_warnings(record=True) as told:
        torch.compile(b, backend="eager")(torch.randn(1, 4))
    assert not [w for w in told if "global hooks" in str(w.message)]
    second.tap.detach()
    assert list(warnings.filters) == filters
    assert not torch.nn.modules.module._global_forward_hooks


def test_watched_model_is_freed(watch):
    model = mlp()
    sink = watch(model)
    model(torch.randn(1, 4)).sum().backward()
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
    assert len(sink.names) == 4


def test_failing_sink_is_reported_and_training_continues_with_gradients(watch):
    model = mlp()
    sink = watch(model)

    def fail(*_):
        raise RuntimeError("planted")

    sink.activation = fail
    x = torch.randn(3, 4)
    model(x).sum().backward()
    assert torch.is_grad_enabled()
    assert model[0].weight.grad is not None
    assert len(sink.errors) == 4
    assert "planted" in sink.errors[0]
    sink.errors.clear()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_goes_through(interrupt):
    def hook() -> None:
        raise interrupt

    with pytest.raises(interrupt):
        protected(hook, lambda *_: None, "x")()


def test_hooks_never_return_anything():
    assert protected(lambda: 5, lambda *_: None, "x")() is None


def test_quiet_switches_off_and_restores():
    with torch.autocast("cpu", torch.bfloat16):
        with quiet():
            assert not torch.is_grad_enabled()
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert torch.is_grad_enabled()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with torch.no_grad(), quiet():
        pass
    with CountsDispatch() as mode:
        with pytest.raises(RuntimeError), quiet():
            torch.ones(2) + torch.ones(3)
        assert mode.seen == []
        torch.ones(1)
        assert mode.seen
    assert torch.is_grad_enabled()
