"""The whole tensors of a watched model, by their names in a snapshot. Copies nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sonde.probe.model import child_of
from sonde.probe.outputs import is_plain_tensor, items_of
from sonde.probe.select import chooser, is_chosen
from sonde.schema.names import site_name, strip_wrappers
from sonde.schema.snapshots.tensors import STORAGE
from sonde.session.snapshots.staging import dtype_name

if TYPE_CHECKING:
    from sonde.probe.model import ModuleRef, NamedParameter
    from sonde.probe.optimizer.tap import OptimizerStep
    from sonde.session.model.watched import WatchedModel

Named = tuple[str, Tensor]
LARGE_BUFFER: Final = 1 << 20
"""Buffers smaller than this are statistics that change in every forward pass; larger ones are constant tables."""
_READABLE: Final = frozenset(getattr(torch, name) for name in STORAGE if hasattr(torch, name))
_MAX_DEPTH: Final = 4
_SHARDED: Final = frozenset({"FullyShardedDataParallel", "FSDPModule"})


class Gather:
    """One watched model, and its selected sites."""

    def __init__(self, watching: WatchedModel, sites: Any, on_unreadable: Callable[[str, str], None]) -> None:
        self.watching, self.on_unreadable = watching, on_unreadable
        self._choose, self._watched = chooser(sites), chooser(watching.plan.sites)
        self._known: dict[str, bool] = {}
        self._read_from: object = None
        self._parameters: list[tuple[str, Any]] = []
        """(name, weak reference); names are computed once, not for every snapshot."""
        self._names: dict[int, tuple[str, Any]] = {}
        self._state_names: dict[tuple[str, str], str] = {}

    def wants_output(self, place: ModuleRef) -> bool:
        """Whether the output of a module is selected."""
        return place.is_selected and self._is_wanted(place.name, place.aliases, [place.ref()])

    def _is_wanted(self, name: str, aliases: Iterable[str], modules: Iterable[Any]) -> bool:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = is_chosen(self._choose, name, aliases, modules)
        return known

    def _wants_parameter(self, named: NamedParameter) -> bool:
        return named.is_selected and self._is_wanted(named.name, named.aliases, [owner() for owner in named.owners])

    def _wants_buffer(self, site: str, module: nn.Module) -> bool:
        place = self.watching.names.place(module)
        is_watched = place is None or place.is_selected or self._watched(site, site, module)
        return is_watched and self._is_wanted(site, (), [module])

    def parameters(self) -> list[Named]:
        self._read_names()
        return [(f"param/{name}", parameter) for name, ref in self._parameters if (parameter := ref()) is not None]

    def buffers(self, *, large: bool) -> list[Named]:
        """Buffers in the model's state; the others can be recomputed from it."""
        return self._readable(
            (f"param/{name}", buffer)
            for name, buffer in self._buffers()
            if (not unreadable(buffer) and buffer.nbytes >= LARGE_BUFFER) == large
        )

    def states(self) -> list[Named]:
        """The states of every known optimizer."""
        self._read_names()
        found = []
        for optimizer in self.watching.optimizers.watched:
            for parameter, state in list(optimizer.state.items()):
                name = self._name_of(parameter)
                if name is not None and isinstance(state, dict):
                    found += [(self._state_name(name, key), v) for key, v in state.items() if isinstance(v, Tensor)]
        return self._readable(found)

    def gradients(self, step: OptimizerStep) -> list[Named]:
        """The gradients of one optimizer's parameters; for a non-torch optimizer, those of all parameters."""
        self._read_names()
        optimizer: Any = step.optimizer
        if optimizer is None:
            stepped = [parameter for _, ref in self._parameters if (parameter := ref()) is not None]
        else:
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = [(self._name_of(p), p.grad) for p in stepped if p.grad is not None]
        return self._readable((f"grad/{name}", grad) for name, grad in named if name is not None)

    def inputs(self, args: Any, kwargs: Any) -> list[Named]:
        pairs = [*enumerate(args), *kwargs.items()]
        return self._readable(found for key, value in pairs for found in _tensors(value, f"batch/input.{key}", 0))

    def is_sharded(self) -> bool:
        """Whether this process holds only a part of each parameter."""
        model = self.watching.names.model()
        return model is not None and any(
            cls.__name__ in _SHARDED for module in model.modules() for cls in type(module).__mro__
        )

    # -------------------------------------------------------------------------------------------------------- internals

    def _read_names(self) -> None:
        """Recomputed only when the model's own names have been read again."""
        known = self.watching.names.parameters
        if known is self._read_from:
            return
        wanted = [named for named in known.values() if self._wants_parameter(named)]
        readable = {name for name, _ in self._readable((named.name, named.ref()) for named in wanted)}
        self._parameters = [(named.name, named.ref) for named in wanted if named.name in readable]
        self._names = {id(ref()): (name, ref) for name, ref in self._parameters}
        self._read_from = known

    def _name_of(self, parameter: Any) -> str | None:
        name, ref = self._names.get(id(parameter), (None, None))
        return name if ref is not None and ref() is parameter else None  # ids are reused

    def _state_name(self, name: str, key: Any) -> str:
        known = self._state_names.get((name, key))
        if known is None:
            known = self._state_names[name, key] = f"optim/{name}.{site_name(str(key))}"
        return known

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
                if self._wants_buffer(site, module):
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
    """Why the bytes of a tensor cannot be copied directly; empty if they can."""
    if is_plain_tensor(tensor) and tensor.layout is torch.strided and tensor.dtype in _READABLE:
        return ""
    if isinstance(tensor, Tensor) and is_lazy(tensor):
        return "not initialised yet"
    if not is_plain_tensor(tensor):
        return "without data (meta)" if getattr(tensor, "is_meta", False) else f"a {type(tensor).__name__}"
    return str(tensor.layout) if tensor.layout is not torch.strided else f"of type {dtype_name(tensor.dtype)}"


def root_of(model: nn.Module) -> nn.Module:
    """The module inside a wrapper for several processes, or of a compiler."""
    while True:
        inner = child_of(model, "_orig_mod")
        if inner is None and type(model).__name__ == "DistributedDataParallel":
            inner = child_of(model, "module")
        if inner is None:
            return model
        model = inner


def _tensors(value: Any, path: str, depth: int) -> Iterator[Named]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth < _MAX_DEPTH:
        for key, item in items_of(value):
            yield from _tensors(item, f"{path}.{site_name(str(key))}", depth + 1)
