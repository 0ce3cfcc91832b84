"""The whole tensors of a watched model, by the names they have in a snapshot. Copies nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sonde.probe.outputs import is_plain_tensor, items_of
from sonde.probe.select import chooser
from sonde.schema.names import site_name, strip_wrappers
from sonde.schema.tensors import STORAGE
from sonde.session.staging import dtype_name

if TYPE_CHECKING:
    from sonde.probe.optimizer import OptimizerStep
    from sonde.session.watching import Watching

Named = tuple[str, Tensor]
LARGE_BUFFER: Final = 1 << 20
"""Buffers of fewer bytes are statistics that change in every forward pass; larger ones are tables that never do."""
_MAX_DEPTH: Final = 4
_SHARDED: Final = frozenset({"FullyShardedDataParallel", "FSDPModule"})


class Gather:
    """One watched model, and the sites of it that are wanted."""

    def __init__(self, watching: Watching, sites: Any, on_unreadable: Callable[[str, str], None]) -> None:
        self.watching, self.on_unreadable = watching, on_unreadable
        self._choose = chooser(sites)
        self._known: dict[str, bool] = {}

    def is_wanted(self, name: str, module: Any = None, aliases: tuple[str, ...] = ()) -> bool:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = any(self._choose(name, alias, module) for alias in (name, *aliases))
        return known

    def parameters(self) -> list[Named]:
        return self._readable((f"param/{name}", parameter) for name, parameter in self._parameters())

    def buffers(self, *, large: bool) -> list[Named]:
        """Those that the model's state holds; the others are made anew from it."""
        return self._readable(
            (f"param/{name}", buffer)
            for name, buffer in self._buffers()
            if (not unreadable(buffer) and buffer.nbytes >= LARGE_BUFFER) == large
        )

    def states(self) -> list[Named]:
        """Of every optimizer that is known."""
        names = {id(parameter): name for name, parameter in self._parameters()}
        return self._readable(
            (f"optim/{names[id(parameter)]}.{site_name(str(key))}", value)
            for optimizer in self.watching.optimizers.watched
            for parameter, state in list(optimizer.state.items())
            if id(parameter) in names and isinstance(state, dict)
            for key, value in state.items()
            if isinstance(value, Tensor)
        )

    def gradients(self, step: OptimizerStep) -> list[Named]:
        """Those of one optimizer; of all parameters where the optimizer is not torch's."""
        if step.optimizer is None:
            return self._readable((f"grad/{n}", p.grad) for n, p in self._parameters() if p.grad is not None)
        names = {id(parameter): name for name, parameter in self._parameters()}
        stepped = (p for group in step.optimizer.param_groups for p in group["params"])
        return self._readable(
            (f"grad/{names[id(p)]}", p.grad) for p in stepped if id(p) in names and p.grad is not None
        )

    def inputs(self, args: Any, kwargs: Any) -> list[Named]:
        pairs = [*enumerate(args), *kwargs.items()]
        return self._readable(found for key, value in pairs for found in _tensors(value, f"batch/input.{key}", 0))

    def is_sharded(self) -> bool:
        """Whether this process has only a part of each parameter."""
        model = self.watching.names.model()
        return model is not None and any(
            cls.__name__ in _SHARDED for module in model.modules() for cls in type(module).__mro__
        )

    # ------------------------------------------------------------------------------------------------------- inside

    def _parameters(self) -> Iterator[tuple[str, Any]]:
        for named in list(self.watching.names.parameters.values()):
            parameter = named.ref()
            if parameter is not None and named.is_selected and self.is_wanted(named.name, aliases=named.aliases):
                yield named.name, parameter

    def _buffers(self) -> Iterator[tuple[str, Any]]:
        model = self.watching.names.model()
        if model is None:
            return
        prefix = site_name(self.watching.names.prefix)
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None or name in module._non_persistent_buffers_set:
                    continue
                site = prefix + site_name(strip_wrappers(f"{path}.{name}" if path else name))
                place = self.watching.names.place(module)
                if (place is None or place.is_selected) and self.is_wanted(site, module):
                    yield site, buffer

    def _readable(self, named: Any) -> list[Named]:
        found = []
        for name, tensor in named:
            why = unreadable(tensor)
            if why:
                self.on_unreadable(name, why)
            else:
                found.append((name, tensor))
        return found


def unreadable(tensor: Any) -> str:
    """Why the bytes of a tensor cannot be copied as they are; empty when they can."""
    if not is_plain_tensor(tensor):
        return f"a {type(tensor).__name__}" if not getattr(tensor, "is_meta", False) else "without data (meta)"
    if is_lazy(tensor):
        return "not initialised yet"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout}"
    return "" if dtype_name(tensor.dtype) in STORAGE else f"of type {dtype_name(tensor.dtype)}"


def root_of(model: nn.Module) -> nn.Module:
    """What a wrapper for several processes, or a compiler, has wrapped."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and type(model).__name__ == "DistributedDataParallel":
            inner = model._modules.get("module")
        if inner is None:
            return model
        model = inner


def _tensors(value: Any, path: str, depth: int) -> Iterator[Named]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth < _MAX_DEPTH:
        for key, item in items_of(value):
            yield from _tensors(item, f"{path}.{site_name(str(key))}", depth + 1)
