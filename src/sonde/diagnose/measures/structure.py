"""What is known of the model: its modules in the order in which they run, its parameters, its optimizer, its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sonde.schema.window import Window

NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm", "SyncBatchNorm", "LocalResponseNorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the watched model."""

    name: str
    type: str
    kind: str = "other"
    """activation norm linear conv embedding rnn attention dropout softmax container loss other"""
    order: int = -1
    """Its place in the first forward pass; -1: not called."""
    calls: int = 0
    is_leaf: bool = True
    detail: Mapping[str, Any]
    """Everything else the structure document says: `p` of a dropout, `dim` of a softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the watched model."""

    name: str
    shape: tuple[int, ...]
    owner: str
    module_type: str
    trainable: bool = True
    in_optimizer: bool = True
    optimizer: int = 0
    """The number of its optimizer, and of its group there; -1: it is in none."""
    group: int = 0
    fan_in: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """A weight matrix or a convolution's kernel: what gradients must pass through."""
        return len(self.shape) >= 2 and "Embedding" not in self.module_type and not self.is_norm

    @property
    def is_norm(self) -> bool:
        return any(self.module_type.startswith(norm) or self.module_type.endswith("Norm") for norm in NORMS)

    @property
    def is_lora(self) -> bool:
        return "lora_" in self.name.lower()


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure document, typed; empty when the run has none."""

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]
    optimizers: tuple[Mapping[str, Any], ...]
    loss: str

    def module(self, name: str) -> Module | None:
        return next((module for module in self.modules if module.name == name), None)

    def parameter(self, name: str) -> Parameter | None:
        return next((parameter for parameter in self.parameters if parameter.name == name), None)

    @property
    def in_order(self) -> list[Module]:
        """Modules that were called, first to last."""
        return sorted((module for module in self.modules if module.order >= 0), key=lambda module: module.order)

    @property
    def matrices(self) -> list[Parameter]:
        """Trainable weight matrices from the input to the output; biases, norms, embeddings and frozen ones out."""
        order = {module.name: module.order for module in self.modules}
        found = [p for p in self.parameters if p.is_matrix and p.trainable]
        place = {p.name: index for index, p in enumerate(found)}
        return sorted(
            found, key=lambda p: (order.get(p.owner, -1) if order.get(p.owner, -1) >= 0 else 10**9, place[p.name])
        )

    def group_value(self, key: str, default: Any = None) -> Any:
        """A hyperparameter of the first group of the first optimizer: `lr`, `eps`, `weight_decay`."""
        for optimizer in self.optimizers:
            for group in optimizer.get("groups", ()):
                return group.get(key, default)
        return default

    def group_of(self, parameter: Parameter) -> Mapping[str, Any]:
        """The hyperparameters a parameter began with; empty when it is in no optimizer."""
        mine = (o for place, o in enumerate(self.optimizers) if o.get("number", place) == parameter.optimizer)
        groups: Sequence[Mapping[str, Any]] = next(mine, {}).get("groups", ())
        return groups[parameter.group] if parameter.in_optimizer and 0 <= parameter.group < len(groups) else {}

    @property
    def optimizer_type(self) -> str:
        return str(self.optimizers[0].get("type", "")) if self.optimizers else ""


def structure(window: Window) -> Structure:
    """The model of this window."""
    if "structure" not in window.notes:
        document = window.facts.get("model")
        window.notes["structure"] = _parse(document if isinstance(document, Mapping) else {}, window)
    known: Structure = window.notes["structure"]
    return known


def _parse(document: Mapping[str, Any], window: Window) -> Structure:
    modules = tuple(
        Module(
            name=str(m.get("name", "")),
            type=str(m.get("type", "")),
            kind=str(m.get("kind") or "other"),
            order=_number(m.get("order"), -1),
            calls=_number(m.get("calls"), 0),
            is_leaf=bool(m.get("is_leaf", True)),
            detail=m,
        )
        for m in document.get("modules", ())
    )
    parameters = tuple(
        Parameter(
            name=str(p.get("name", "")),
            shape=tuple(int(size) for size in p.get("shape", ())),
            owner=str(p.get("owner", "")),
            module_type=str(p.get("module_type", "")),
            trainable=bool(p.get("trainable", True)),
            in_optimizer=bool(p.get("in_optimizer", True)),
            optimizer=_number(p.get("optimizer"), 0),
            group=_number(p.get("group"), 0),
            fan_in=_number(p.get("fan_in"), 0),
            aliases=tuple(str(alias) for alias in p.get("aliases", ())),
        )
        for p in document.get("parameters", ())
    )
    loss = document.get("loss") or window.facts.get("loss") or ""
    return Structure(modules, parameters, tuple(document.get("optimizers", ())), str(loss))


def _number(value: Any, default: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
