"""The order of sites along the depth and the tree of modules, from the model's description or from names alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sonde.run import Run
from sonde.schema.forward_order import ForwardOrder
from sonde.schema.joined import JOINED
from sonde.schema.names import KINDS
from sonde.schema.records import Site
from sonde.schema.stats import STATS

MAX_DEPTH: Final = 32
"""Maximum depth of the tree; deeper modules are attached to their ancestor at this depth."""
_FIELDS: Final = frozenset({"n", "nan", "inf", "zero", "sum", "sumsq", "sumabs", "hist_n"})
_FIRST: Final = ("rms", "norm", "abs_mean", "max_abs", "mean", "std", "zero_fraction", "nonfinite_fraction")
_OF_UPDATES: Final = frozenset({"grad_update_dot", "grad_moment_dot", "second_moment_lag"})
_OF_GRADS: Final = frozenset({"norm_preclip", "clip_factor"})


@dataclass(frozen=True, slots=True)
class Structure:
    """Sites of a run in the order of the forward pass."""

    sites: dict[int, Site]
    depths: dict[int, int]
    """Site id -> position of its module."""
    document: Mapping[str, Any]

    def rows(self, kind: str) -> list[int]:
        """Ids of the sites of a kind from the input to the output."""
        own = [number for number, site in self.sites.items() if site.kind == kind]
        return sorted(own, key=lambda number: (self.depths[number], number))

    def kinds(self) -> list[str]:
        found = {site.kind for site in self.sites.values()}
        return [*(kind for kind in KINDS if kind in found), *sorted(found - set(KINDS))]


def structure_of(run: Run) -> Structure:
    sites, document = run.catalog.require().sites, run.structure()
    order = ForwardOrder(sites, document)
    return Structure(sites, {n: order.depth(site.owner or site.name) for n, site in sites.items()}, document)


def stats_of(kind: str) -> list[str]:
    """Stats of a kind that can be drawn, most useful first."""
    own = [name for name in STATS if name not in _FIELDS]
    own = [name for name in own if (kind == "update" or name not in _OF_UPDATES)]
    own = [name for name in own if (kind == "grad" or name not in _OF_GRADS)]
    joined = [name for name, stat in JOINED.items() if stat.kind == kind]
    return [*(name for name in _FIRST if name in own), *joined, *(name for name in own if name not in _FIRST)]


def stat_dict(name: str, scale: str) -> dict[str, Any]:
    meaning = JOINED[name].meaning if name in JOINED else STATS[name].meaning
    return {"name": name, "meaning": meaning, "scale": scale, "needs_hist": name in STATS and STATS[name].needs_hist}


def module_tree(structure: Structure) -> list[dict[str, Any]]:
    """Every module that has sites, with its ancestors; parents first, children in the order of the forward pass."""
    known = {str(module.get("name")): module for module in structure.document.get("modules", ())}
    nodes: dict[str, dict[str, Any]] = {"": _node("", known, 1 << 30)}
    children: dict[str, list[str]] = {"": []}
    for number in sorted(structure.sites, key=lambda n: (structure.depths[n], n)):
        site = structure.sites[number]
        path = _add(nodes, children, _short(site.owner or site.name), known, structure.depths[number])
        nodes[path]["sites"].append(number)
        if not nodes[path]["type"]:
            nodes[path]["type"] = site.module_type
    return _flattened(nodes, children)


def _short(path: str) -> str:
    return ".".join(path.split(".")[:MAX_DEPTH])


def _node(path: str, known: Mapping[str, Mapping[str, Any]], order: int) -> dict[str, Any]:
    module = known.get(path, {})
    return {
        "path": path,
        "label": path.rpartition(".")[2],
        "type": str(module.get("type", "")),
        "kind": str(module.get("kind", "")),
        "order": order,
        "sites": [],
    }


def _add(
    nodes: dict[str, dict[str, Any]],
    children: dict[str, list[str]],
    path: str,
    known: Mapping[str, Mapping[str, Any]],
    order: int,
) -> str:
    parent = ""
    parts = path.split(".") if path else []
    for depth in range(1, len(parts) + 1):
        own = ".".join(parts[:depth])
        if own not in nodes:
            nodes[own] = _node(own, known, order)
            children[own] = []
            children[parent].append(own)
        parent = own
    return parent


def _flattened(nodes: dict[str, dict[str, Any]], children: dict[str, list[str]]) -> list[dict[str, Any]]:
    flat: list[dict[str, Any]] = []
    waiting = [("", -1, 0)]
    while waiting:
        path, parent, depth = waiting.pop()
        number = len(flat)
        flat.append({"n": number, **nodes[path], "parent": parent, "depth": depth})
        waiting += [(child, number, depth + 1) for child in reversed(children[path])]
    return flat
