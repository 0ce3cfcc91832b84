"""Layers a model cannot find are found; teachers that are hidden on purpose, and what is registered, are not."""

from __future__ import annotations

import torch
from torch import nn

from sonde.probe.structure import unregistered


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(2, 2)
        self.extra: object = None


def test_layers_in_lists_and_dicts_of_any_module_are_found() -> None:
    model = Holder()
    model.extra = [nn.Linear(2, 2), nn.ReLU()]
    outer = nn.Sequential(model)
    assert unregistered(outer) == ["0.extra[0] (Linear)"]
    model.extra = {"a": nn.GRU(2, 2)}
    assert unregistered(model) == ["extra['a'] (GRU)"]


def test_a_tensor_that_wants_a_gradient_is_found() -> None:
    model = Holder()
    model.extra = torch.ones(2, requires_grad=True)
    assert unregistered(model) == ["extra (Tensor)"]


def test_a_frozen_teacher_and_a_second_name_are_not() -> None:
    model = Holder()
    model.extra = [nn.Linear(2, 2).requires_grad_(False), model.known, torch.ones(2), "text"]
    assert unregistered(model) == []


def test_the_result_of_a_forward_pass_is_not_a_parameter() -> None:
    model = Holder()
    model.extra = model.known(torch.ones(1, 2))
    assert unregistered(model) == []
