"""The structure document says what the model is, in plain numbers and words."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from awkward import Awkward
from sonde.probe.model import ModelNames
from sonde.probe.structure import describe, is_mode_dependent, kind_of


class T5LayerNorm(nn.Module):
    pass


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(1, 1), "linear"), (nn.Conv1d(1, 1, 1), "conv"), (nn.ConvTranspose2d(1, 1, 1), "conv"),
        (nn.GELU(), "activation"), (nn.Tanh(), "activation"), (nn.Softmax(-1), "softmax"),
        (nn.LogSoftmax(-1), "softmax"), (nn.BatchNorm2d(1), "norm"), (nn.RMSNorm(1), "norm"),
        (T5LayerNorm(), "norm"), (nn.Embedding(1, 1), "embedding"), (nn.LSTM(1, 1), "rnn"), (nn.GRUCell(1, 1), "rnn"),
        (nn.MultiheadAttention(1, 1), "attention"), (nn.Dropout2d(), "dropout"), (nn.MSELoss(), "loss"),
        (nn.Sequential(nn.ReLU()), "container"), (nn.Flatten(), "other"),
    ],
)  # fmt: skip
def test_kinds(module, kind):
    assert kind_of(module) == kind


def test_modules_that_behave_differently_in_eval():
    assert is_mode_dependent(nn.Dropout(0.1))
    assert not is_mode_dependent(nn.Dropout(0.0))
    assert is_mode_dependent(nn.BatchNorm1d(2))
    assert not is_mode_dependent(nn.BatchNorm1d(2, track_running_stats=False))
    assert not is_mode_dependent(nn.LayerNorm(2))


def test_document_of_an_awkward_model():
    model = Awkward()
    model.first.up.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": [model.first.up.bias]}, {"params": [model.embed.weight], "lr": torch.tensor(0.5)}], lr=1e-3
    )
    document = describe(ModelNames(model), {0: optimizer}, {"first.up": (3, 2)}, "cross_entropy")
    assert document == json.loads(json.dumps(document))
    modules = {module["name"]: module for module in document["modules"]}
    assert modules["first.relu"] == {
        "name": "first.relu", "type": "ReLU", "kind": "activation", "order": -1, "calls": 0, "is_leaf": True,
        "inplace": True,
    }  # fmt: skip
    assert (modules["first.up"]["order"], modules["first.up"]["calls"]) == (3, 2)
    assert modules["first.drop"]["p"] == 0.1
    assert not modules["first"]["is_leaf"]
    parameters = {parameter["name"]: parameter for parameter in document["parameters"]}
    assert parameters["first.up.weight"]["shape"] == [32, 16]
    assert parameters["first.up.weight"]["fan_in"] == 16
    assert not parameters["first.up.weight"]["trainable"]
    assert not parameters["first.up.weight"]["in_optimizer"]
    assert parameters["first.up.weight"]["aliases"] == ["again.up.weight"]
    assert parameters["embed.weight"]["in_optimizer"]
    assert parameters["embed.weight"]["group"] == 1
    assert parameters["embed.weight"]["fan_in"] == 0
    assert parameters["embed.weight"]["aliases"] == ["head.weight"]
    assert document["optimizers"][0]["type"] == "AdamW"
    assert document["optimizers"][0]["groups"][1]["lr"] == 0.5
    assert document["optimizers"][0]["groups"][0]["betas"] == [0.9, 0.999]
    assert document["loss"] == "cross_entropy"
    assert document["total_parameters"] == sum(p.numel() for p in model.parameters())
    assert document["trainable_parameters"] == document["total_parameters"] - 512


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_parameters_without_a_shape_yet():
    document = describe(ModelNames(nn.LazyLinear(3)), {}, {}, "")
    assert [parameter["shape"] for parameter in document["parameters"]] == [[], []]
    assert document["total_parameters"] == 0


def test_fan_in_of_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.ConvTranspose2d(8, 4, 3))
    found = {p["name"]: p["fan_in"] for p in describe(ModelNames(model), {}, {}, "")["parameters"]}
    assert found == {"0.weight": 75, "0.bias": 0, "1.weight": 72, "1.bias": 0}


def test_what_adapters_are_multiplied_by_is_kept_and_what_attention_is_scaled_by_is_not():
    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
            self.scaling = {"default": 2.0, "odd": None}

    class Attention(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.scaling = 0.125

    model = nn.ModuleDict({"q": Adapted(), "attention": Attention()})
    found = {row["name"]: row for row in describe(ModelNames(model), {}, {}, "")["modules"]}
    assert found["q"]["scaling"] == {"default": 2.0}
    assert "scaling" not in found["attention"]
