"""The way of each layer's gradient from the loss: which weights attenuate it, and what its input flows around.

A weight close to zero, such as a LayerScale, the last gamma of a residual branch or LoRA's B, lets next to no gradient
through at initialisation. It gets a large gradient itself and grows within a few steps: then it is a gate that opens,
and the layers before it are compared with one another instead of with the rest of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from sonde.flow.graph import Graph, Scale
from sonde.show.flow.metrics import Route

GATE: Final = 0.05
"""A weight that passes less than this fraction of its input, measured as its rms times the root of the fan-in."""
_MAX_SOURCES: Final = 64


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter after the pass."""

    rms: float
    has_gradient: bool
    """Whether its gradient has any value other than zero."""


def routes(graph: Graph, weights: Mapping[str, Weight], leaves: Collection[str]) -> dict[str, Route]:
    """The route of every module whose output reaches the loss, or was detached."""
    gates = {
        node: weights[scale.parameter].rms == 0 for node, scale in graph.scales.items() if _is_gate(scale, weights)
    }
    regions, is_waiting = _regions(graph, gates)
    at = {node: name for name, nodes in graph.outputs.items() if name in leaves for node in nodes}
    main = {name: place for place, name in enumerate(_main_way(graph, at))}
    sources, uses = _sources(graph, at)
    found = {}
    for name, nodes in graph.outputs.items():
        region = min((regions[node] for node in nodes), key=lambda region: region[0])
        fed = frozenset().union(*(sources[node] for node in nodes))
        found[name] = Route(
            is_connected=True,
            place=main.get(name, _place_of(nodes, at, main)),
            is_waiting=all(is_waiting[node] for node in nodes),
            region=region[1],
            source=next(iter(fed)) if len(fed) == 1 and uses.get(next(iter(fed))) == {name} else "",
            used_by=tuple(sorted(uses.get(name, ()))),
        )
    for name in graph.cut_off - found.keys():
        found[name] = Route(is_connected=False, is_detached=True)
    return found


def _place_of(nodes: Collection[int], at: Mapping[int, str], main: Mapping[str, int]) -> int | None:
    """The place of a module whose output a layer inside it, or before it, computed."""
    return next((main[at[node]] for node in nodes if at.get(node) in main), None)


def _is_gate(scale: Scale, weights: Mapping[str, Weight]) -> bool:
    weight = weights.get(scale.parameter)
    return weight is not None and weight.has_gradient and weight.rms * scale.fan_in**0.5 < GATE


def _regions(graph: Graph, gates: Mapping[int, bool]) -> tuple[list[tuple[int, str]], list[bool]]:
    """By node: the number of gates before it on the way from the loss, and the last one; and whether a weight of
    exactly zero is on every way."""
    regions: list[tuple[int, str]] = []
    is_waiting: list[bool] = []
    for consumers in graph.consumers:
        ways = [(regions[c][0] + 1, graph.scales[c].parameter) if c in gates else regions[c] for c in consumers]
        regions.append(min(ways, default=(0, "")))
        is_waiting.append(bool(consumers) and all(gates.get(c, False) or is_waiting[c] for c in consumers))
    return regions, is_waiting


def _main_way(graph: Graph, at: Mapping[int, str]) -> tuple[str, ...]:
    """The layers that everything passes on its way from the input to the loss, in this order. Of several inputs, the
    one furthest from the loss counts. A residual branch, a gate, or another input is not among them."""
    above: list[int] = []
    """The next node on every way to the loss."""
    length: list[int] = []
    """Layers on the longest way."""
    for node, consumers in enumerate(graph.consumers):
        meeting = consumers[0] if consumers else -1
        for other in consumers[1:]:
            while meeting != other:  # every node has a larger number than what is above it
                if meeting > other:
                    meeting = above[meeting]
                else:
                    other = above[other]
        above.append(meeting)
        length.append(max((length[c] for c in consumers), default=0) + (node in at))
    node = max(at, key=lambda node: length[node], default=-1)
    found: dict[str, None] = {}
    while node >= 0:
        if node in at:
            found[at[node]] = None
        node = above[node]
    return tuple(found)


def _sources(graph: Graph, at: Mapping[int, str]) -> tuple[list[frozenset[str]], dict[str, set[str]]]:
    """By node: the layers whose outputs it is computed from. And by layer: the layers that use its output; "" is the
    loss. `at`: the layer that computed a node."""
    sources: list[frozenset[str]] = [frozenset()] * len(graph.inputs)
    for node in range(len(graph.inputs) - 1, -1, -1):
        fed: set[str] = set()
        for other in graph.inputs[node]:
            fed |= {at[other]} if other in at else sources[other]
        sources[node] = frozenset(fed) if len(fed) <= _MAX_SOURCES else frozenset()
    uses: dict[str, set[str]] = {}
    for node, name in [*at.items(), (0, "")] if graph.inputs else []:
        for source in sources[node]:
            uses.setdefault(source, set()).add(name)
    return sources, uses
