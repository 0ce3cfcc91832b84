"""Loops as others write them: parts of a model called directly, home-made optimizers, subclasses of tensors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from sonde.show.coverage import coverage_sentences


def test_a_module_whose_parts_are_called_and_that_is_never_called_itself(begin: Any, reopen: Any) -> None:
    """As in a LightningModule whose `training_step` calls `self.net(x)`."""

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def training_step(self, x: Any) -> Any:
            return self.net(x).sum()

    model = Trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin() as session:
        session.watch(model, optimizer)
        for _ in range(3):
            model.training_step(torch.randn(2, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = reopen()
    assert {"net", "net.0", "net.1"} <= set(run.sites("act/*")["site"].to_pylist())
    assert run.stats("act/net.0/rms")["step"].to_pylist() == [0, 1, 2]


def test_a_home_made_optimizer_is_noticed_and_the_remedy_named(begin: Any, reopen: Any) -> None:
    model = nn.Linear(4, 2)
    with begin() as session:
        session.watch(model)
        for _ in range(12):
            model(torch.randn(3, 4)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert any("sonde.step()" in str(warning) for warning in reopen().warnings)


class Image(torch.Tensor):
    """As in fastai: a name for the type, and plain data."""


class Opaque(torch.Tensor):
    """Only it knows its data."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_activations_of_tensor_subclasses(begin: Any, reopen: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    wanted = model(x).square().mean().sqrt().item()
    with begin() as session:
        session.watch(model, optimizer)
        out = model(x.as_subclass(Image))
        assert type(out) is Image
        out.sum().backward()
        optimizer.step()
    found = reopen().stats("act/1/rms")["value"].to_pylist()
    assert found == [torch.tensor(wanted).item()] or abs(found[0] - wanted) < 1e-6


def test_a_layer_whose_output_cannot_be_recorded_is_in_the_coverage(begin: Any, reopen: Any) -> None:
    class Hidden(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.Tensor._make_subclass(Opaque, x.detach())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hidden = nn.Linear(4, 2), Hidden()

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            self.hidden(x)
            return x

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with begin() as session:
        session.watch(model, optimizer)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    coverage = reopen().coverage()
    assert coverage["outputs_unread"] == ["hidden"]
    assert coverage_sentences(coverage) == ["1 module ran without an output that can be recorded: hidden"]


def test_complex_parameters_are_recorded_without_a_warning(begin: Any, reopen: Any) -> None:
    model = nn.Linear(4, 2, dtype=torch.complex64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with begin() as session:
            session.watch(model, optimizer, snapshots=1)
            for _ in range(2):
                model(torch.randn(3, 4, dtype=torch.complex64)).abs().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    run = reopen()
    assert run.warnings == []
    assert {"grad", "param", "update", "optim", "act"} <= set(run.sites()["kind"].to_pylist())
    assert run.tensors.snapshot(1)["param/weight"].dtype == "complex64"
