"""Matches the tensors of two models: by name if the names agree, otherwise layer by layer in order.

A layer is matched as a whole, so that a bias never goes with another layer's weight. Ambiguous tensors stay unmatched:
a wrong pair is worse than none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sonde.schema.frameworks.layers import canonical
from sonde.schema.frameworks.layouts import Canonical, Shape

Layer = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Match:
    """One tensor of both models."""

    a: Canonical
    b: Canonical
    by: Literal["name", "layer", "order"]
    """Equal names; equal except for case and separators; or layers of the same shapes in the same order."""


@dataclass(frozen=True, slots=True)
class Matching:
    """All pairs, and the tensors without a partner."""

    pairs: tuple[Match, ...]
    only_a: tuple[Canonical, ...]
    only_b: tuple[Canonical, ...]


def match_models(a: Mapping[str, Shape], b: Mapping[str, Shape]) -> Matching:
    """Pair the tensors of two models, each given as shapes by name, of any framework.

    >>> found = match_models({"0.weight": (8, 3), "0.bias": (8,)}, {"dense/kernel": (3, 8), "dense/bias": (8,)})
    >>> [(pair.a.name, pair.b.parts[0].source) for pair in found.pairs]
    [('0.weight', 'dense/kernel'), ('0.bias', 'dense/bias')]
    """
    layers_a, layers_b = _by_layer(canonical(a)), _by_layer(canonical(b))
    partner: dict[Layer, tuple[Layer, Literal["name", "layer", "order"]]] = {}
    _match_names(layers_a, layers_b, partner)
    _match_order(layers_a, layers_b, partner)
    pairs: list[Match] = []
    for layer, (other, by) in partner.items():
        roles = {c.role: c for c in layers_b[other]}
        pairs += [Match(c, roles[c.role], by) for c in layers_a[layer] if c.role in roles]
    rank = {id(c): place for place, c in enumerate(c for layer in layers_a.values() for c in layer)}
    pairs.sort(key=lambda pair: rank[id(pair.a)])
    used = {id(c) for pair in pairs for c in (pair.a, pair.b)}
    rest_a, rest_b = (
        [c for layer in layers.values() for c in layer if id(c) not in used] for layers in (layers_a, layers_b)
    )
    return Matching(tuple(pairs), tuple(rest_a), tuple(rest_b))


def _by_layer(found: Iterable[Canonical]) -> dict[Layer, list[Canonical]]:
    layers: dict[Layer, list[Canonical]] = {}
    for one in found:
        layers.setdefault(one.layer, []).append(one)
    return layers


def _match_names(
    a: Mapping[Layer, Sequence[Canonical]],
    b: Mapping[Layer, Sequence[Canonical]],
    partner: dict[Layer, tuple[Layer, Literal["name", "layer", "order"]]],
) -> None:
    plain: dict[str, list[Layer]] = {}
    for layer in b:
        plain.setdefault(_plain(layer), []).append(layer)
    for layer in a:
        if layer in b:
            partner[layer] = layer, "name"
            continue
        likely = [other for other in plain.get(_plain(layer), []) if _signature(a[layer]) == _signature(b[other])]
        if len(likely) == 1 and likely[0] not in a:
            partner[layer] = likely[0], "layer"


def _plain(layer: Layer) -> str:
    """`Encoder_0` and `encoder.0` are the same."""
    return re.sub(r"[^a-z0-9]+", ".", ".".join(layer).lower())


def _match_order(
    a: Mapping[Layer, Sequence[Canonical]],
    b: Mapping[Layer, Sequence[Canonical]],
    partner: dict[Layer, tuple[Layer, Literal["name", "layer", "order"]]],
) -> None:
    taken = {other for other, _ in partner.values()}
    groups: list[dict[object, list[Layer]]] = []
    for layers, done in ((a, set(partner)), (b, taken)):
        group: dict[object, list[Layer]] = {}
        for layer in _in_order([layer for layer in layers if layer not in done]):
            group.setdefault(_signature(layers[layer]), []).append(layer)
        groups.append(group)
    for signature, ours in groups[0].items():
        theirs = groups[1].get(signature, [])
        if len(ours) == len(theirs) and _has_order(ours) and _has_order(theirs):
            partner.update({layer: (other, "order") for layer, other in zip(ours, theirs, strict=True)})


def _signature(layer: Sequence[Canonical]) -> frozenset[tuple[str, Shape]]:
    return frozenset((c.role, c.shape) for c in layer if not c.role.startswith("num_batches"))


def _in_order(layers: list[Layer]) -> list[Layer]:
    """In the given order, which is that of the model; if it is alphabetical, by the numbers in the names."""
    return sorted(layers, key=_natural) if layers == sorted(layers) else layers


def _has_order(layers: Sequence[Layer]) -> bool:
    """Whether the order is meaningful: a single layer, numbered layers, or an order that is not alphabetical."""
    stems = {re.sub(r"[\d_]+", "", ".".join(layer)) for layer in layers}
    return len(layers) == 1 or len(stems) == 1 or list(layers) != sorted(layers)


def _natural(layer: Layer) -> list[tuple[int, int, str]]:
    """Dense_2 before Dense_10, and `dense` before `dense_1`."""
    parts = re.findall(r"\d+|[^\d]+", ".".join(layer).rstrip("_"))
    return [(0, int(part), "") if part.isdigit() else (1, 0, part.strip("_./")) for part in parts]
