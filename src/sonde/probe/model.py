"""The names of a model's modules and parameters, by identity and by weak reference only: the model stays the user's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from sonde.schema.names import site_name, strip_wrappers, unique_sites

_GOLDEN: Final = 0.6180339887498949


def is_in_part(number: int, part: tuple[int, int]) -> bool:
    """Whether the n-th of many things belongs to this part of them, given as (number, parts). Models repeat: each part
    gets some of every kind of module.

    >>> [next(k for k in range(3) if is_in_part(number, (k, 3))) for number in range(9)]
    [0, 1, 0, 2, 1, 0, 2, 0, 2]
    """
    return part[1] == 1 or int(number * _GOLDEN % 1 * part[1]) == part[0]


@dataclass(slots=True, eq=False)
class ModuleRef:
    """A module of the watched model. `keys` caches the sink's keys for it."""

    ref: weakref.ref[nn.Module]
    name: str
    module_type: str
    aliases: tuple[str, ...]
    is_selected: bool = True
    has_fired: bool = False
    is_unread: bool = False
    """Whether an output had no tensor that could be recorded."""
    keys: dict[tuple[str, str], Any] = field(default_factory=dict)
    number: int = 0
    """Its position among the modules."""

    def is_in(self, part: tuple[int, int]) -> bool:
        """Whether it belongs to this part of the modules, given as (number, parts)."""
        return is_in_part(self.number, part)


@dataclass(slots=True, eq=False)
class NamedParameter:
    """A parameter's name and the modules that own it: one, unless it is shared."""

    ref: weakref.ref[nn.Parameter]
    name: str
    owner: str
    module_type: str
    aliases: tuple[str, ...]
    owners: tuple[weakref.ref[nn.Module], ...]
    is_selected: bool = True


class ModelNames:
    """Looks modules and parameters up by identity; ids are reused, so each hit checks its reference."""

    def __init__(self, model: nn.Module, *, prefix: str = "", is_inside: bool = False) -> None:
        """`is_inside`: a wrapper's name belongs to the module that it wraps, instead of to the wrapper."""
        self.model = weakref.ref(model)
        self.prefix, self.is_inside = prefix, is_inside
        self.choose: Callable[[NamedParameter], bool] = lambda _: True
        self.choose_place: Callable[[ModuleRef], bool] = lambda _: True
        self.places: dict[int, ModuleRef] = {}
        self.parameters: dict[int, NamedParameter] = {}
        self.version = 0
        """The number of times the names were read."""
        self.refresh()

    def refresh(self) -> None:
        """Read the names again; a model may have grown, or its parameters may have been replaced."""
        model = self.model()
        if model is None:
            return
        self.version += 1
        named = list(model.named_modules(remove_duplicate=False))  # once: it takes as long as all the rest
        root = _root_name(named)
        fresh = dict(_places(named, root, self.prefix, self.is_inside))
        self.places = {key: self._known(key, place) for key, place in fresh.items()} if self.places else fresh
        parameters = dict(_parameters(named, root, self.prefix))
        for parameter in parameters.values():
            parameter.is_selected = self.choose(parameter)
        self.parameters = parameters  # not before they are selected: another thread may read them

    def _known(self, key: int, place: ModuleRef) -> ModuleRef:
        """Keep what is known about a place across a refresh."""
        known = self.places.get(key)
        if known is not None and known.ref() is place.ref():
            return known
        place.is_selected = self.choose_place(place)
        return place

    def place(self, module: nn.Module) -> ModuleRef | None:
        place = self.places.get(id(module))
        if place is not None or self.is_inside:
            return place if place is not None and place.ref() is module else None
        # torch.compile(model) created after `watch`: the wrapper is called instead of the module inside.
        inner = child_of(module, "_orig_mod")
        return self.place(inner) if inner is not None else None

    def scripted_inside(self) -> list[str]:
        """Modules that torch.jit runs without Python, where no hook sees them: those inside a scripted one."""
        model = self.model()
        scripted = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)] if model is not None else []
        inside = {id(inner) for module in scripted for inner in module.modules() if inner is not module}
        return [place.name for key, place in self.places.items() if key in inside]

    def parameter(self, parameter: Any) -> NamedParameter | None:
        named = self.parameters.get(id(parameter))
        return named if named is not None and named.ref() is parameter else None


def type_name(module: nn.Module) -> str:
    """The name of its class; for a scripted module, of the original class.

    >>> type_name(torch.jit.script(nn.Tanh()))
    'Tanh'
    """
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    # `fully_shard` gives a module a new class, FSDPLinear, derived from FSDPModule and Linear.
    bases = type(module).__bases__
    is_wrapped = len(bases) > 1 and bases[0].__name__ == "FSDPModule"
    return (bases[1] if is_wrapped else type(module)).__name__


def class_of(module: nn.Module) -> type:
    """Its class; for a scripted module, the torch class that it was made from, if it was one."""
    found = getattr(nn, type_name(module), None) if isinstance(module, torch.jit.ScriptModule) else None
    return found if isinstance(found, type) else type(module)


def child_of(module: nn.Module, name: str) -> nn.Module | None:
    """A submodule. A scripted module keeps its submodules in something that is not quite a dict: it lacks `get`."""
    children: Any = vars(module).get("_modules")
    return children[name] if children is not None and name in children else None


_Named = list[tuple[str, nn.Module]]
"""Every module under each of its names."""


def _root_name(named: _Named) -> str:
    """The model itself has no name; it is "model", unless one of its modules is (as in many language models)."""
    first = {id(module): name for name, module in reversed(named)}
    names = {strip_wrappers(name) for name in first.values()}
    return next(name for name in ("model", "root", "the model") if name not in names)


def _places(named: _Named, root: str, prefix: str, is_inside: bool) -> Iterator[tuple[int, ModuleRef]]:
    """Each module once, under its first name; the other names of a shared module are its aliases."""
    found: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in named:
        found.setdefault(id(module), (module, []))[1].append(name)
    called: dict[int, str] = {}
    before = site_name(prefix)
    for key, (module, names) in found.items():
        if not _has_forward(module):
            continue  # a list or a dict of modules is never called
        stripped = strip_wrappers(names[0])
        if names[0] and stripped == strip_wrappers(names[0].rpartition(".")[0]):
            if not is_inside:
                continue  # a wrapper and its module are one place, and the wrapper is the one that is always called
            called = {other: name for other, name in called.items() if strip_wrappers(name) != stripped}
        called[key] = names[0]
    sites = unique_sites(list(called.values()))
    for number, (key, site) in enumerate(zip(called, sites, strict=True)):
        module, names = found[key]
        site = (before + site).rstrip(".") or root
        aliases = _aliases(site, prefix, names)
        yield key, ModuleRef(weakref.ref(module), site, type_name(module), aliases, number=number)


def _has_forward(module: nn.Module) -> bool:
    """Looked up in the class dictionary: the class of a scripted module raises on attribute access."""
    if "forward" in vars(module):
        return True
    defined = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
    return defined is not vars(nn.Module)["forward"]


def _aliases(site: str, prefix: str, names: list[str]) -> tuple[str, ...]:
    if len(names) == 1:
        return ()
    aliases = dict.fromkeys(site_name(prefix + strip_wrappers(alias)) for alias in names[1:])
    return tuple(alias for alias in aliases if alias != site)


def _parameters(named: _Named, root: str, prefix: str) -> Iterator[tuple[int, NamedParameter]]:
    found: dict[int, tuple[nn.Parameter, list[str], list[nn.Module]]] = {}
    for module_name, module in named:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            entry = found.setdefault(id(parameter), (parameter, [], []))
            entry[1].append(f"{module_name}.{name}" if module_name else name)
            entry[2].append(module)
    before = site_name(prefix)
    sites = unique_sites([names[0] for _, names, _ in found.values()])
    for (key, (parameter, names, owners)), site in zip(found.items(), sites, strict=True):
        site = before + site
        aliases = _aliases(site, prefix, names)
        owner, refs = site.rpartition(".")[0] or root, tuple(map(weakref.ref, owners))
        yield key, NamedParameter(weakref.ref(parameter), site, owner, type_name(owners[0]), aliases, refs)
