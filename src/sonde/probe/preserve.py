"""Leaves a model exactly as it was found: parameters, buffers, gradients, mode, attributes, random generators."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sonde.errors import UsageError

COPIED_BYTES: Final = 1 << 28
"""Parameters up to this total size are copied, for models that change their own; above it, only those known to
change."""
_CONTAINERS: Final = (dict, list, set, deque)
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OWN: Final = frozenset({"_parameters", "_buffers", "_modules"})
_EMPTY: Final = object()
"""Marks an empty slot of a container."""


@contextmanager
def preserved(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Run something on the model; afterwards every bit is as before. Gradients start empty inside."""
    modules = list(model.modules())
    owned, held = _owned(modules), _held(modules)
    _refuse_lazy(model, (*owned, *held))
    buffers = [(module, _tensors(module._buffers)) for module in modules]
    is_small = sum(p.numel() * p.element_size() for p in owned) <= COPIED_BYTES
    parameters = [kept for module in modules if (kept := _tensors(_changing(module, is_small)))]
    attributes = [(module, _attributes(module)) for module in modules]
    grads = [(parameter, parameter.grad) for parameter in owned]
    generators = _random_states({tensor.device for tensor in (*owned, *held)})
    try:
        for parameter, _ in grads:
            parameter.grad = None
        if training is not None:
            model.train(training)
        yield
    finally:
        for module, saved in attributes:
            _restore_attributes(module, saved)
        for module, tensors in buffers:
            _restore(module._buffers, tensors)
        for tensors in parameters:
            _write_back(tensors)
        for parameter, grad in grads:
            parameter.grad = grad
        _restore_random(generators)


@contextmanager
def all_preserved(model: nn.Module, function: Any) -> Iterator[None]:
    """The model, and every other module that a loss function holds: a GAN's discriminator, a perceptual loss."""
    with ExitStack() as stack:
        stack.enter_context(preserved(model))
        others = modules_within(function)
        own = {id(module) for module in model.modules()} if others else set()
        for other in others:
            if id(other) not in own:
                stack.enter_context(preserved(other))
        yield


def modules_within(function: Any) -> list[nn.Module]:
    """Modules that a function is, is bound to, closes over, or names in its module."""
    found: list[Any] = []
    while isinstance(function, functools.partial):
        found += [*function.args, *function.keywords.values()]
        function = function.func
    found += [function, getattr(function, "__self__", None)]
    code = getattr(function, "__code__", None)
    if code is not None:
        cells = (cell for cell in function.__closure__ or () if _is_filled(cell))
        found += [cell.cell_contents for cell in cells]
        found += [function.__globals__.get(name) for name in code.co_names]
    return list({id(item): item for item in found if isinstance(item, nn.Module)}.values())


def _is_filled(cell: Any) -> bool:
    try:
        return bool(cell.cell_contents is not cell)
    except ValueError:  # a name that has no value yet
        return False


def _owned(modules: list[nn.Module]) -> list[nn.Parameter]:
    """Each parameter once. The same as `model.parameters()`, which walks the modules and takes five times as long."""
    found = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    return list(found.values())


def _held(modules: list[nn.Module]) -> list[Tensor]:
    return [b for module in modules if module._buffers for b in module._buffers.values() if b is not None]


def _refuse_lazy(model: nn.Module, tensors: Iterable[Tensor]) -> None:
    if not any(map(is_lazy, tensors)):
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(f"{name} has no shape yet. Run the model on a batch first:  model(x)")


# ----------------------------------------------------------------------------------------------- buffers and parameters

_Saved = dict[str, tuple[Tensor, Tensor] | None]


def _tensors(owned: dict[str, Any]) -> _Saved:
    """Each tensor, and its contents."""
    return {name: None if t is None else (t, t.detach().clone()) for name, t in owned.items()}


def _changing(module: nn.Module, is_small: bool) -> dict[str, Any]:
    """Parameters that a forward pass may change. An embedding with a max_norm rescales its rows as it is used."""
    return dict(module._parameters) if is_small or getattr(module, "max_norm", None) is not None else {}


def _restore(owned: dict[str, Any], saved: _Saved) -> None:
    for name in [name for name in owned.keys() if name not in saved]:  # noqa: SIM118 - for a scripted module it is not a dict
        del owned[name]
    _write_back(saved)
    for name, entry in saved.items():
        was = None if entry is None else entry[0]
        if name not in owned or owned[name] is not was:
            owned[name] = was


def _write_back(saved: _Saved) -> None:
    for entry in saved.values():
        # Only changed tensors are written: a copy would count as a change of a tensor that autograd may have saved.
        if entry is not None and not _same_bits(*entry):
            with torch.no_grad():
                if entry[0].shape != entry[1].shape:
                    entry[0].resize_(entry[1].shape)  # it has grown, as the ranges that quantization observes do
                entry[0].data.copy_(entry[1])


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Compared as integers: a NaN then equals itself, and 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    kind = _INTEGERS.get(a.element_size())
    if kind is None or a.layout is not torch.strided:
        return False  # written back unconditionally
    return torch.equal(a.detach().view(kind), b.view(kind))


# ----------------------------------------------------------------------------------------------------------- attributes


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Every attribute, and the contents of containers: counters, caches, hidden states, hooks."""
    return {name: (value, _inside(value)) for name, value in vars(module).items() if name not in _OWN}


def _inside(value: Any) -> Any:
    if isinstance(value, _CONTAINERS):
        return value.copy() if len(value) else _EMPTY  # most are empty: the hooks that a module does not have
    return value.detach().clone() if type(value) is Tensor else None


def _restore_attributes(module: nn.Module, saved: dict[str, tuple[Any, Any]]) -> None:
    attributes = vars(module)
    for name in [name for name in attributes if name not in saved and name not in _OWN]:
        del attributes[name]
    for name, (value, inside) in saved.items():
        if inside is _EMPTY:
            if len(value):
                value.clear()
        elif inside is not None:
            if isinstance(inside, Tensor):
                _write_back({name: (value, inside)})
            elif not _same_items(value, inside):
                _refill(value, inside)
        if attributes.get(name, module) is not value:
            attributes[name] = value


def _same_items(a: Any, b: Any) -> bool:
    """By identity: comparing tensors would compare their elements."""
    if len(a) != len(b):
        return False
    if isinstance(a, set):
        return bool(a == b)
    pairs = zip(a.items(), b.items(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
    if isinstance(a, dict):
        return all(x[0] is y[0] and x[1] is y[1] for x, y in pairs)
    return all(x is y for x, y in pairs)


def _refill(value: Any, inside: Any) -> None:
    value.clear()
    value.extend(inside) if isinstance(value, list | deque) else value.update(inside)


# ------------------------------------------------------------------------------------------------------- random numbers


def _random_states(devices: set[torch.device]) -> list[tuple[Any, Any]]:
    """(function that restores it, state) for torch, for each GPU among the devices, for numpy and for Python."""
    states: list[tuple[Any, Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 - a model may draw from the global generator
        (random.setstate, random.getstate()),
    ]
    for device in sorted((device for device in devices if device.type == "cuda"), key=str):
        states.append((functools.partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    return states


def _restore_random(states: list[tuple[Any, Any]]) -> None:
    for put_back, state in states:
        put_back(state)
