"""Leave a model exactly as it was found: buffers, gradients, mode, plain attributes, and the random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def preserved(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Run something on the model; afterwards every bit is as before. Gradients start empty inside.

    Parameters are not copied: nothing here steps an optimizer. A model that changes its own parameters in `forward` is
    the one thing that would be seen.
    """
    buffers = {id(module): _buffers(module) for module in model.modules()}
    plain = {id(module): _plain(module) for module in model.modules()}
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    random = _random_states(model)
    try:
        for parameter, _ in grads:
            parameter.grad = None
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
            _restore_plain(module, plain[id(module)])
            _restore_buffers(module, buffers[id(module)])
        for parameter, grad in grads:
            parameter.grad = grad
        _restore_random(random)


def _buffers(module: nn.Module) -> dict[str, tuple[Tensor, Tensor] | None]:
    """Each buffer, and what is in it."""
    return {name: None if b is None else (b, b.detach().clone()) for name, b in module._buffers.items()}


def _restore_buffers(module: nn.Module, saved: dict[str, tuple[Tensor, Tensor] | None]) -> None:
    for name in [name for name in module._buffers if name not in saved]:
        del module._buffers[name]
    for name, entry in saved.items():
        if entry is None:
            module._buffers[name] = None
            continue
        buffer, value = entry
        with torch.no_grad():
            # Only what changed is written: a copy would count as a change of a tensor that autograd may have saved.
            if not _same_bits(buffer, value):
                buffer.data.copy_(value)
        module._buffers[name] = buffer


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan()))


def _plain(module: nn.Module) -> dict[str, Any]:
    """Numbers, words and flags that a forward pass may count up."""
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _restore_plain(module: nn.Module, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if vars(module).get(name, module) is not value:
            vars(module)[name] = value


def _random_states(model: nn.Module) -> list[tuple[torch.device | None, Tensor]]:
    states: list[tuple[torch.device | None, Tensor]] = [(None, torch.get_rng_state())]
    devices = {p.device for p in (*model.parameters(), *model.buffers()) if p.device.type == "cuda"}
    states.extend((device, torch.cuda.get_rng_state(device)) for device in sorted(devices, key=str))
    return states


def _restore_random(states: list[tuple[torch.device | None, Tensor]]) -> None:
    for device, state in states:
        if device is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
