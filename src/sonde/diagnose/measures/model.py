"""The structure of the model: its modules in the order in which they run, its parameters, optimizers and loss.

Some parts are recognised by their shapes and names: adapters (LoRA), mixtures of experts (three or more identical
children of one module, with a router next to them) and the projections of attention layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sonde.schema.window import Window, noted

NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm", "InstanceNorm", "SyncBatchNorm", "LocalResponseNorm")
MIN_EXPERTS: Final = 3
_ROLES: Final = {
    "query": re.compile(r"(^|[._])(w?q|query|queries|q_?proj|query_?proj|to_q|lin(ear)?_q|q_lin(ear)?)$"),
    "key": re.compile(r"(^|[._])(w?k|keys?|k_?proj|key_?proj|to_k|lin(ear)?_k|k_lin(ear)?)$"),
    "value": re.compile(r"(^|[._])(w?v|values?|v_?proj|value_?proj|to_v|lin(ear)?_v|v_lin(ear)?)$"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    name: str
    type: str
    kind: str = "other"
    """activation norm linear conv embedding rnn attention dropout softmax container loss other"""
    order: int = -1
    """Its position in the first forward pass; -1 if it was not called."""
    calls: int = 0
    is_leaf: bool = True
    detail: Mapping[str, Any]
    """Everything else in the structure document: `p` of a dropout, `dim` of a softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    owner: str
    module_type: str
    trainable: bool = True
    in_optimizer: bool = True
    optimizer: int = 0
    """The number of its optimizer, and of its group there; -1 if it is in no optimizer."""
    group: int = 0
    fan_in: int = 0
    aliases: tuple[str, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """Whether it is a weight matrix or a convolution kernel, through which gradients must pass."""
        return len(self.shape) >= 2 and "Embedding" not in self.module_type and not self.is_norm

    @property
    def is_norm(self) -> bool:
        return any(self.module_type.startswith(norm) or self.module_type.endswith("Norm") for norm in NORMS)

    @property
    def is_lora(self) -> bool:
        return "lora_" in self.name.lower()


@dataclass(frozen=True, slots=True)
class Structure:
    """The structure document as typed values; empty if the run has none."""

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
        """Modules that were called, in call order."""
        return sorted((module for module in self.modules if module.order >= 0), key=lambda module: module.order)

    @property
    def matrices(self) -> list[Parameter]:
        """Trainable weight matrices from input to output, without biases, norms, embeddings and frozen weights."""
        order = {module.name: module.order for module in self.modules}
        found = [p for p in self.parameters if p.is_matrix and p.trainable]
        place = {p.name: index for index, p in enumerate(found)}
        return sorted(
            found, key=lambda p: (order.get(p.owner, -1) if order.get(p.owner, -1) >= 0 else 10**9, place[p.name])
        )

    def group_value(self, key: str) -> Any:
        """A hyperparameter of the first group of the first optimizer: `lr`, `eps`, `weight_decay`."""
        groups = [group for optimizer in self.optimizers for group in optimizer.get("groups", ())]
        return groups[0].get(key) if groups else None

    def group_of(self, parameter: Parameter) -> Mapping[str, Any]:
        """The initial hyperparameters of a parameter's group; empty if it is in no optimizer."""
        mine = (o for place, o in enumerate(self.optimizers) if o.get("number", place) == parameter.optimizer)
        groups: Sequence[Mapping[str, Any]] = next(mine, {}).get("groups", ())
        return groups[parameter.group] if parameter.in_optimizer and 0 <= parameter.group < len(groups) else {}

    @property
    def optimizer_type(self) -> str:
        return str(self.optimizers[0].get("type", "")) if self.optimizers else ""


@noted
def structure(window: Window) -> Structure:
    """The structure of the model that this window was recorded from."""
    found = window.facts.get("model")
    document = found if isinstance(found, Mapping) else {}
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


@dataclass(frozen=True, slots=True)
class Adapter:
    """A frozen weight W (out, in) with two small trained weights, A (r, in) and B (out, r), and the module that adds
    B A to W."""

    module: str
    a: str
    b: str
    base: str
    base_module: str
    rank: int
    width: int
    """The smaller dimension of the weight: the maximum possible rank."""


@noted
def adapters(window: Window) -> list[Adapter]:
    """The adapters of the model, recognised by their shapes whatever their names."""
    matrices = [p for p in structure(window).parameters if len(p.shape) == 2 and "Embedding" not in p.module_type]
    trained: dict[str, list[Parameter]] = {}
    for parameter in matrices:
        if parameter.trainable:
            for module in _above(parameter.name):
                trained.setdefault(module, []).append(parameter)
    found: list[Adapter] = []
    taken: set[str] = set()
    for base in matrices:
        if base.trainable:
            continue
        # The nearest module that holds a matching pair: two levels up in plain LoRA, three in PEFT.
        for module in _above(base.name)[:4]:
            pair = _pair(base, [p for p in trained.get(module, ()) if p.name not in taken])
            if pair is not None:
                a, b = pair
                taken.update((a.name, b.name))
                found.append(Adapter(module, a.name, b.name, base.name, base.owner, a.shape[0], min(base.shape)))
                break
    return found


def _above(name: str) -> list[str]:
    """Modules that contain a parameter, innermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]


def _pair(base: Parameter, trained: list[Parameter]) -> tuple[Parameter, Parameter] | None:
    """A and B of a frozen weight; a module with any other trained matrix is not an adapter."""
    if len(trained) != 2:
        return None
    out, fan_in = base.shape
    for a, b in (trained, trained[::-1]):
        rank = a.shape[0]
        if a.shape == (rank, fan_in) and b.shape == (out, rank) and rank <= max(out, fan_in):
            return a, b
    return None


@dataclass(frozen=True, slots=True)
class Mixture:
    """One mixture-of-experts layer."""

    site: str
    """The module that lists the experts: `layers.0.experts`."""
    router: str
    """Name of the router's weight."""
    experts: dict[str, tuple[str, ...]]
    """Names of the parameters of each expert."""


def mixtures(window: Window) -> list[Mixture]:
    """Every mixture-of-experts layer of the model."""
    parameters = [p for p in structure(window).parameters if p.trainable]
    found = []
    for site, children in _lists(parameters).items():
        experts = {child: tuple(p.name for p in own) for child, own in children.items()}
        router = _router(site, len(experts), parameters)
        if len(experts) >= MIN_EXPERTS and router is not None and _are_alike(list(children.values()), site):
            found.append(Mixture(site, router, experts))
    return found


def _lists(parameters: list[Parameter]) -> dict[str, dict[str, list[Parameter]]]:
    """Modules with numbered children, with the parameters of each child."""
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
    """A matrix of the same parent, outside the experts, with one row per expert."""
    parent = site.rpartition(".")[0]
    for p in parameters:
        inside = p.name.startswith(f"{parent}.") if parent else True
        if inside and not p.name.startswith(f"{site}.") and len(p.shape) == 2 and num_experts in p.shape[:2]:
            return p.name
    return None


@dataclass(frozen=True, slots=True)
class Projections:
    """Names of the query, key and value weights of one attention layer."""

    site: str
    query: str
    key: str
    value: str

    @property
    def names(self) -> tuple[str, str, str]:
        return self.query, self.key, self.value


def projections(window: Window) -> list[Projections]:
    """Every attention layer with separate weights for queries, keys and values; fused weights cannot be compared."""
    known = structure(window)
    weights = [p for p in known.parameters if len(p.shape) == 2 and "Embedding" not in p.module_type and not p.is_lora]
    parents: dict[str, list[Parameter]] = {}
    for weight in weights:
        parents.setdefault(_parent(weight), []).append(weight)
    found = [_by_name(site, own) for site, own in parents.items()]
    named = [layer for layer in found if layer is not None]
    attended = {site for site, _, _ in window.by_site("attn/*/entropy")}
    rest = [_by_order(known, site, parents.get(site, [])) for site in attended - {layer.site for layer in named}]
    return [*named, *(layer for layer in rest if layer is not None)]


def _parent(weight: Parameter) -> str:
    """The module that contains the projection, or the bare parameter."""
    is_layer = weight.name == f"{weight.owner}.weight"
    return weight.owner.rpartition(".")[0] if is_layer else weight.owner


def _word(weight: Parameter) -> str:
    """The last part of a weight's name: `query` for `blocks.0.query.weight`, `q_proj` for torch's own attention."""
    name = weight.name.removesuffix(".weight").removesuffix("_weight")
    return name.rpartition(".")[2].lower()


def _by_name(site: str, weights: list[Parameter]) -> Projections | None:
    roles: dict[str, str] = {}
    for weight in weights:
        for role, pattern in _ROLES.items():
            if pattern.search(_word(weight)):
                roles.setdefault(role, weight.name)
    return Projections(site, **roles) if len(roles) == len(_ROLES) else None


def _by_order(known: Structure, site: str, weights: list[Parameter]) -> Projections | None:
    """The first three linear layers of an attention module, if they have the same shape. Otherwise one of them may
    project keys and values together, or positions, and need not learn at the same rate as the others."""
    order = {module.name: module.order for module in known.modules if module.kind == "linear"}
    called = sorted((w for w in weights if order.get(w.owner, -1) >= 0), key=lambda w: order[w.owner])
    if len(called) < 3 or len({w.shape for w in called[:3]}) != 1:
        return None
    return Projections(site, *(w.name for w in called[:3]))
