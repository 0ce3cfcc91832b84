"""Names of modules and parameters: the same whatever wraps the model, and found again when they are replaced."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from sonde.probe.model import ModelNames


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class DataParallel(nn.Module):
    """As DDP keeps what it wraps."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)


class Peft(nn.Module):
    """As PEFT keeps it: base_model.model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.base_model.forward = lambda *args: model(*args)

    def forward(self, *args):
        return self.base_model(*args)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def checkpointed_blocks(model: nn.Module) -> nn.Module:
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return model


def places(model: nn.Module, **options: str) -> list[str]:
    return [place.name for place in ModelNames(model, **options).places.values()]


def parameters(model: nn.Module, **options: str) -> list[str]:
    return [named.name for named in ModelNames(model, **options).parameters.values()]


PLACES = [
    "model", "embed", "layers.0", "layers.0.up", "layers.0.down", "layers.1", "layers.1.up", "layers.1.down",
]  # fmt: skip
WRAPPERS = {
    "nothing": lambda model: model,
    "data parallel": DataParallel,
    "compile": compiled,
    "compiled data parallel": lambda model: compiled(DataParallel(model)),
    "data parallel of compiled": lambda model: DataParallel(compiled(model)),
    "peft": Peft,
    "checkpoint": checkpointed_blocks,
    "all of them": lambda model: DataParallel(compiled(Peft(checkpointed_blocks(model)))),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_do_not_depend_on_wrappers(wrapper):
    model = WRAPPERS[wrapper](Net())
    assert places(model) == PLACES
    assert sorted(parameters(model)) == sorted(name for name, _ in Net().named_parameters())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_called_is_what_has_the_name(watch, wrapper):
    model = WRAPPERS[wrapper](Net())
    sink = watch(model)
    model(torch.tensor([1, 2]))
    assert sink.names[-1] == "model"
    assert set(sink.names) <= set(PLACES)
    if "compile" not in wrapper and wrapper != "all of them":
        assert sorted(sink.names) == sorted(PLACES)


def test_prefix_tells_models_apart():
    assert places(Net(), prefix="generator.")[:2] == ["generator", "generator.embed"]
    assert parameters(Net(), prefix="generator.")[0] == "generator.scale"


def test_module_named_model_is_not_taken_for_the_model_itself(watch):
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = Net(), nn.Linear(4, 7)
            self.bias = nn.Parameter(torch.zeros(7))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.model(tokens)) + self.bias

    for wrap in (lambda model: model, DataParallel, Peft):
        model = wrap(Causal())
        names = places(model)
        assert len(names) == len(set(names))
        assert {"model", "lm_head", "model.layers.0.up"} < set(names)
        sink = watch(model)
        model(torch.tensor([1]))
        assert dict(sink.activations)["model"].shape == (1, 4)
        assert dict(sink.activations)[names[0]].shape == (1, 7)
        owners = {named.name: named.owner for named in ModelNames(model).parameters.values()}
        assert owners["bias"] == names[0] != "model"
        sink.tap.detach()


def test_shared_module_is_one_site_with_aliases():
    model = nn.Module()
    model.encoder = Block()
    model.decoder = model.encoder
    found = {place.name: place.aliases for place in ModelNames(DataParallel(model)).places.values()}
    assert found["encoder"] == ("decoder",)
    assert found["encoder.up"] == ("decoder.up",)
    assert "decoder" not in found


def test_tied_weight_is_one_site_with_aliases():
    model = nn.Module()
    model.embed, model.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    model.head.weight = model.embed.weight
    (named,) = ModelNames(model).parameters.values()
    assert (named.name, named.aliases, named.owner, named.module_type) == (
        "embed.weight", ("head.weight",), "embed", "Embedding",
    )  # fmt: skip


def test_lists_of_modules_are_no_sites():
    assert "layers" not in places(Net())


def replace_by_assignment(model: Net) -> None:
    model.layers[0].up.weight = nn.Parameter(torch.zeros(8, 4))


def load_by_assignment(model: Net) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def convert(model: Net) -> None:
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


@pytest.mark.parametrize("replace", [replace_by_assignment, load_by_assignment, convert])
def test_replaced_parameter_is_found_again(follow, replace):
    model = Net()
    steps = follow(model)
    old = model.layers[0].up.weight
    replace(model)
    assert model.layers[0].up.weight is not old
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert sorted(steps.before[0][1]) == sorted(name for name, _ in model.named_parameters())


def test_module_added_later_is_found_after_a_refresh():
    model = Net()
    names = ModelNames(model)
    model.extra = nn.Linear(1, 1)
    assert names.place(model.extra) is None
    names.refresh()
    assert names.place(model.extra).name == "extra"


def test_what_is_known_of_a_place_survives_a_refresh():
    model = Net()
    names = ModelNames(model)
    place = names.place(model.embed)
    place.keys["act", ""] = 7
    place.has_fired = True
    names.refresh()
    assert names.place(model.embed) is place


def test_another_object_at_the_same_address_is_not_recognised():
    model = Net()
    names = ModelNames(model)
    stranger = nn.Linear(1, 1)
    names.places[id(stranger)] = names.place(model.embed)
    names.parameters[id(stranger.weight)] = names.parameter(model.scale)
    assert names.place(stranger) is None
    assert names.parameter(stranger.weight) is None


def test_names_do_not_keep_the_model():
    model = Net()
    names = ModelNames(model)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
    names.refresh()


HOSTILE = [
    "a/b",
    "<script>alert(1)</script>",
    "line\nbreak",
    "x" * 10_000,
    "..",
    "%2F",
    "nul\0",
    "\x1b[31m",
    "ü",
    " ",
    "\u202e",
]


def test_hostile_names_stay_distinct_and_safe():
    keys = [key for key in HOSTILE if "." not in key]
    model = nn.ModuleDict({key: nn.Linear(1, 1, bias=False) for key in keys})
    names = places(nn.Sequential(model))
    found = parameters(nn.Sequential(model))
    assert len(set(found)) == len(keys)
    for name in [*names, *found]:
        assert "/" not in name
        assert name.isprintable() or name.isspace() or "ü" in name
        assert "\n" not in name
        assert "\0" not in name
        assert "\x1b" not in name
    assert "0.a%2Fb.weight" in found
    assert "0.%252F.weight" in found  # and what only looks encoded stays different
    assert f"0.{'x' * 10_000}.weight" in found


def test_hostile_names_are_recorded(watch, follow):
    model = nn.Sequential(nn.ModuleDict({"a/b": nn.Linear(1, 1)}), nn.Linear(1, 1))
    sink, steps = watch(model), follow(model)
    out = model[1](model[0]["a/b"](torch.ones(1, 1)))
    out.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert sink.names == ["0.a%2Fb", "1"]
    assert steps.before[0][1][0] == "0.a%2Fb.weight"


def test_names_that_stripping_would_make_equal_stay_apart():
    model = nn.Module()
    model.module = nn.Linear(1, 1, bias=False)
    model.module.inner = nn.Linear(1, 1, bias=False)
    model.inner = nn.Linear(1, 1, bias=False)
    found = parameters(model)
    assert len(found) == len(set(found)) == 3
    assert len(places(model)) == len(set(places(model)))
