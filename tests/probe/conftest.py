"""Sinks that write down what the taps hand over, and taps that are always taken off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sonde.probe.forward import ForwardTap
from sonde.probe.model import ModelNames, ModuleRef
from sonde.probe.optimizer.clip import ClipTap
from sonde.probe.optimizer.tap import OptimizerStep, OptimizerTap


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Sink:
    """What a forward tap saw, in order."""

    def __init__(self) -> None:
        self.wants_activations = self.wants_activation_grads = True
        self.is_idle = False
        self.activations: list[tuple[str, Tensor]] = []
        self.grads: list[tuple[str, Tensor]] = []
        self.num_forwards = 0
        self.errors: list[str] = []

    def forward_seen(self, place: Any, output: Any) -> None:
        self.num_forwards += 1

    def module_called(self, place: ModuleRef, module: nn.Module, args: Any, output: Any) -> None:
        assert not torch.is_grad_enabled()

    def activation(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        assert not torch.is_grad_enabled()
        self.activations.append((place.name + suffix, tensor.detach().clone()))

    def activation_grad(self, place: ModuleRef, suffix: str, tensor: Tensor) -> None:
        assert not torch.is_grad_enabled()
        self.grads.append((place.name + suffix, tensor.detach().clone()))

    def on_error(self, where: str, error: Exception) -> None:
        self.errors.append(f"{where}: {type(error).__name__}: {error}")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.activations]

    @property
    def grad_names(self) -> list[str]:
        return [name for name, _ in self.grads]


@pytest.fixture
def watch() -> Iterator[Callable[..., Sink]]:
    """Attach a forward tap to a model; its failures fail the test."""
    taps: list[tuple[ForwardTap, Sink]] = []

    def attach(model: nn.Module, **names: Any) -> Sink:
        sink = Sink()
        tap = ForwardTap(ModelNames(model, **names), sink, sink.on_error)
        taps.append((tap, sink))
        sink.tap = tap  # type: ignore[attr-defined]
        return sink

    yield attach
    for tap, sink in taps:
        tap.detach()
        assert sink.errors == []


class Steps:
    """What an optimizer tap saw."""

    def __init__(self) -> None:
        self.before: list[tuple[int, list[str]]] = []
        self.after: list[tuple[int, list[str]]] = []
        self.clips: list[dict[str, float]] = []
        self.errors: list[str] = []
        self.unnamed: list[str] = []
        self.is_wanted = True

    def on_before(self, step: OptimizerStep) -> None:
        names = [named.name for named in step.names]
        self.before.append((step.number, names))
        taken = step.clips.factors
        factors = {n: taken[id(p)] for n, p in zip(names, step.params, strict=True) if id(p) in taken}
        self.clips.append({name: float(factor) for name, factor in factors.items()})

    def on_after(self, step: OptimizerStep) -> None:
        self.after.append((step.number, [named.name for named in step.names]))

    def on_error(self, where: str, error: Exception) -> None:
        self.errors.append(f"{where}: {type(error).__name__}: {error}")


@pytest.fixture
def follow() -> Iterator[Callable[..., Steps]]:
    """Attach a clip tap and an optimizer tap to a model."""
    taps: list[Any] = []
    seen: list[Steps] = []

    def attach(model: nn.Module, optimizers: Any = None) -> Steps:
        steps = Steps()
        clip = ClipTap(steps.on_error)
        tap = OptimizerTap(
            ModelNames(model),
            optimizers,
            is_wanted=lambda: steps.is_wanted,
            on_before=steps.on_before,
            on_after=steps.on_after,
            on_error=steps.on_error,
            take_clips=clip.take,
            on_unnamed=lambda optimizer: steps.unnamed.append(type(optimizer).__name__),
        )
        steps.tap, steps.clip_tap = tap, clip  # type: ignore[attr-defined]
        taps.extend([tap, clip])
        seen.append(steps)
        return steps

    yield attach
    for tap in taps:
        tap.detach()
    for steps in seen:
        assert steps.errors == []
