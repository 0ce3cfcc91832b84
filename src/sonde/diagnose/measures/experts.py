"""Mixtures of experts, found by their make: three or more children of one module that are alike, and a router beside
them with one output for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sonde.diagnose.measures.structure import Parameter, structure
from sonde.schema.window import Window

MIN_EXPERTS: Final = 3


@dataclass(frozen=True, slots=True)
class Mixture:
    """One layer of experts."""

    site: str
    """The list of experts: `layers.0.experts`."""
    router: str
    """The weight of its router."""
    experts: dict[str, tuple[str, ...]]
    """Expert -> names of its parameters."""


def mixtures(window: Window) -> list[Mixture]:
    """Every layer of experts of the model."""
    parameters = [p for p in structure(window).parameters if p.trainable]
    found = []
    for site, children in _lists(parameters).items():
        experts = {child: tuple(p.name for p in own) for child, own in children.items()}
        router = _router(site, len(experts), parameters)
        if len(experts) >= MIN_EXPERTS and router is not None and _are_alike(list(children.values()), site):
            found.append(Mixture(site, router, experts))
    return found


def _lists(parameters: list[Parameter]) -> dict[str, dict[str, list[Parameter]]]:
    """Modules with numbered children, and the parameters below each child."""
    lists: dict[str, dict[str, list[Parameter]]] = {}
    for parameter in parameters:
        parts = parameter.name.split(".")
        for depth in range(1, len(parts) - 1):
            if parts[depth].isdigit():
                site = ".".join(parts[:depth])
                lists.setdefault(site, {}).setdefault(".".join(parts[: depth + 1]), []).append(parameter)
    return lists


def _are_alike(children: list[list[Parameter]], site: str) -> bool:
    def make(own: list[Parameter]) -> list[tuple[str, tuple[int, ...]]]:
        return sorted((p.name.removeprefix(site).split(".", 2)[-1], p.shape) for p in own)

    return all(make(own) == make(children[0]) for own in children[1:])


def _router(site: str, num_experts: int, parameters: list[Parameter]) -> str | None:
    """A matrix under the same parent, outside the experts, with one row for each of them."""
    parent = site.rpartition(".")[0]
    for p in parameters:
        inside = p.name.startswith(f"{parent}.") if parent else True
        if inside and not p.name.startswith(f"{site}.") and len(p.shape) == 2 and num_experts in p.shape[:2]:
            return p.name
    return None
