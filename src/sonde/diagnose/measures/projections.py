"""The query, key and value projections of attention layers: by their names, else by their place before the softmax."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from sonde.diagnose.measures.structure import Parameter, Structure, structure
from sonde.schema.window import Window

_ROLES: Final = {
    "query": re.compile(r"(^|[._])(w?q|query|queries|q_?proj|query_?proj|to_q|lin(ear)?_q|q_lin(ear)?)$"),
    "key": re.compile(r"(^|[._])(w?k|keys?|k_?proj|key_?proj|to_k|lin(ear)?_k|k_lin(ear)?)$"),
    "value": re.compile(r"(^|[._])(w?v|values?|v_?proj|value_?proj|to_v|lin(ear)?_v|v_lin(ear)?)$"),
}


@dataclass(frozen=True, slots=True)
class Projections:
    """Names of the weights of one attention layer."""

    site: str
    query: str
    key: str
    value: str

    @property
    def names(self) -> tuple[str, str, str]:
        return self.query, self.key, self.value


def projections(window: Window) -> list[Projections]:
    """Every attention layer with a weight each for queries, keys and values; fused ones have no parts to compare."""
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
    """The module that holds the projection; of a bare parameter, the module that holds that."""
    is_layer = weight.name == f"{weight.owner}.weight"
    return weight.owner.rpartition(".")[0] if is_layer else weight.owner


def _word(weight: Parameter) -> str:
    """`query` of `blocks.0.query.weight`; `q_proj_weight` is that of torch's own attention."""
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
    """The first three linear layers of a module that attends, if they have the same shape. Otherwise one of them may
    project keys and values together, or positions, and need not learn at the rate of the others."""
    order = {module.name: module.order for module in known.modules if module.kind == "linear"}
    called = sorted((w for w in weights if order.get(w.owner, -1) >= 0), key=lambda w: order[w.owner])
    if len(called) < 3 or len({w.shape for w in called[:3]}) != 1:
        return None
    return Projections(site, *(w.name for w in called[:3]))
