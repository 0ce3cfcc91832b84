"""model.json of a JAX program: from the names of its parameters, and from its Flax model if `describe` was called."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from sonde.schema.frameworks.layouts import kind_of_layer
from sonde.schema.layout import MODEL_FILE
from sonde.schema.records import Site
from sonde.session.session import Session

ROOT: Final = "model"
"""The model itself, which has no name in its parameter tree."""
_NUMBERED: Final = re.compile(r"([A-Z]\w*?)_\d+")
"""linen names a module after its class: Dense_0."""
_OF_PARAMETERS: Final = ("param", "grad", "update")
Module = tuple[str, str, int]
"""Name, class and number of calls."""


class JaxStructure:
    """The known structure of one session's model."""

    def __init__(self) -> None:
        self.modules: Sequence[Module] = ()
        self._sites: dict[str, Site] = {}
        self._seen: set[tuple[Any, ...]] = set()

    def is_new(self, names: tuple[Any, ...]) -> bool:
        """Whether these names are new; called at every step."""
        is_new = names not in self._seen
        self._seen.add(names)
        return is_new

    def add(self, sites: Iterable[Site]) -> None:
        for site in sites:
            if site.kind in _OF_PARAMETERS:
                self._sites.setdefault(site.name, site)

    def document(self) -> dict[str, Any]:
        sites = sorted(self._sites.values(), key=lambda site: _natural(site.name))
        modules = [_module(*known, place, sites) for place, known in enumerate(self.modules)]
        if not modules:
            modules = [_module(name, _class_of(name), 0, -1, sites) for name in _owners(sites)]
        types = {module["name"]: module["type"] for module in modules}
        sizes = sum(math.prod(site.shape or ()) for site in sites)
        return {
            "framework": "jax",
            "modules": modules,
            "parameters": [_parameter(site, types) for site in sites],
            "optimizers": [],
            "loss": "",
            "unregistered": [],
            "total_parameters": sizes,
            "trainable_parameters": sizes,
        }


_known: WeakKeyDictionary[Session, JaxStructure] = WeakKeyDictionary()


def structure_of(session: Session) -> JaxStructure:
    return _known.setdefault(session, JaxStructure())


def write_structure(session: Session) -> None:
    session.recording.writer.document(MODEL_FILE, structure_of(session).document())


def _module(name: str, type_name: str, calls: int, order: int, sites: Sequence[Site]) -> dict[str, Any]:
    mine = {_leaf(site.name): site for site in sites if _owner(site.name) == name}
    is_leaf = name != ROOT and (bool(mine) or not any(site.name.startswith(f"{name}.") for site in sites))
    kind = kind_of_layer(type_name)
    if kind == "other":
        kind = _kind_of(mine) if mine else "other" if is_leaf else "container"
    return {"name": name, "type": type_name, "kind": kind, "order": order, "calls": calls, "is_leaf": is_leaf}


def _kind_of(parameters: dict[str, Site]) -> str:
    """Guess a module's class from the names of its parameters."""
    if "embedding" in parameters:
        return "embedding"
    if "kernel" in parameters:
        return "linear" if len(parameters["kernel"].shape or ()) == 2 else "conv"
    return "norm" if "scale" in parameters else "other"


def _parameter(site: Site, types: dict[str, str]) -> dict[str, Any]:
    shape, owner = list(site.shape or ()), _owner(site.name)
    is_embedding = _leaf(site.name) == "embedding"
    return {
        "name": site.name,
        "shape": shape,
        "dtype": site.dtype,
        "trainable": True,
        "owner": owner,
        # Rules know embedding tables by this word; Flax says Embed.
        "module_type": "Embedding" if is_embedding else types.get(owner, ""),
        "in_optimizer": True,
        "group": 0,
        "fan_in": math.prod(shape[:-1]) if _leaf(site.name) == "kernel" and len(shape) in (2, 4) else 0,
        "aliases": [],
    }


def _owners(sites: Iterable[Site]) -> list[str]:
    """Every module on the path to a parameter, the outer ones first."""
    found: dict[str, None] = {}
    for site in sites:
        parts = site.name.split(".")[:-1]
        found.update({".".join(parts[: i + 1]): None for i in range(len(parts))})
    return list(found)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _class_of(name: str) -> str:
    found = _NUMBERED.fullmatch(_leaf(name))
    return found[1] if found else ""


def _natural(name: str) -> list[tuple[int, str]]:
    """Dense_2 before Dense_10, in order of creation; JAX trees are sorted alphabetically."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
