"""Facts about a model that an analysis collects before anything runs, each once: a GPU would wait for all of it.

Attention is found by its layers: `nn.MultiheadAttention`, three projections under their usual names, or a fused one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from torch import nn

from sonde.probe.model import ModelNames

_TRIPLES: Final = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"), ("q_lin", "k_lin", "v_lin"), ("W_q", "W_k", "W_v"), ("query_proj", "key_proj", "value_proj"),
)  # fmt: skip
_FUSED: Final = ("qkv", "c_attn", "in_proj", "query_key_value", "Wqkv", "qkv_proj", "to_qkv")


class ModelIndex:
    """The names in a model, its modules, and its attention layers. Holds the model: must not be kept."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = ModelNames(model, is_inside=True)

    @cached_property
    def modules(self) -> list[nn.Module]:
        return list(self.model.modules())

    @cached_property
    def attention(self) -> list[Attention]:
        return find_attention(self.modules, self.names)


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention module and its three projections: parameter names, and the rows that belong to each."""

    layer: str
    module: nn.Module
    parameters: dict[str, tuple[str, nn.Parameter, int, int]]
    """query, key, value -> (name, parameter, which third, of how many)"""
    is_transposed: bool = False
    num_heads: int | None = None


def find_attention(modules: Iterable[nn.Module], names: ModelNames) -> list[Attention]:
    """Every attention among the modules of a model, in order."""
    found = []
    for module in modules:
        place = names.place(module) if module._modules else None  # a module without layers is not an attention
        if place is None:
            continue
        parameters = _multihead(module) or _triple(module) or _fused(module)
        if parameters:
            named = {key: (site_of(names, p), p, i, n) for key, (p, i, n) in parameters.items()}
            is_conv1d = any(type(child).__name__ == "Conv1D" for child in module.children())
            found.append(Attention(place.name, module, named, is_conv1d, _num_heads(module)))
    return found


def site_of(names: ModelNames, parameter: nn.Parameter) -> str:
    named = names.parameter(parameter)
    return named.name if named is not None else ""


_Parts = dict[str, tuple[nn.Parameter, int, int]]


def _multihead(module: nn.Module) -> _Parts | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    keys, joint = ("query", "key", "value"), module._parameters.get("in_proj_weight")
    if joint is not None:
        return {key: (joint, i, 3) for i, key in enumerate(keys)}
    separate = [module._parameters.get(f"{key[0]}_proj_weight") for key in keys]
    return {key: (p, 0, 1) for key, p in zip(keys, separate, strict=True) if p is not None}


def weight_of(module: nn.Module | None) -> nn.Parameter | None:
    """A layer's weight, or the parameter behind it. Not by `.weight`: a spectral norm changes on access."""
    if module is None:
        return None
    own = module._parameters.get("weight")
    made = module._modules.get("parametrizations")
    if own is None and isinstance(made, nn.ModuleDict) and "weight" in made:
        return made["weight"]._parameters.get("original")
    return own


def _triple(module: nn.Module) -> _Parts | None:
    children = module._modules
    for names in _TRIPLES:
        if not all(name in children for name in names):
            continue
        found = [weight for name in names if (weight := weight_of(children[name])) is not None]
        if len(found) == 3:
            return {key: (weight, 0, 1) for key, weight in zip(("query", "key", "value"), found, strict=True)}
    return None


def _fused(module: nn.Module) -> _Parts | None:
    for name, child in module._modules.items():
        weight = weight_of(child) if name in _FUSED else None
        if weight is not None and weight.ndim == 2 and max(weight.shape) % 3 == 0:
            return {key: (weight, i, 3) for i, key in enumerate(("query", "key", "value"))}
    return None


def _num_heads(module: nn.Module) -> int | None:
    for name in ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "h"):
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    config = getattr(module, "config", None)
    value = getattr(config, "num_attention_heads", None)
    return value if isinstance(value, int) else None


def queries_and_keys(attention: Iterable[Attention]) -> set[str]:
    """Names of the modules that project to queries or keys alone."""
    found = set()
    for part in attention:
        value = part.parameters["value"][1]
        separate = [part.parameters[key] for key in ("query", "key") if part.parameters[key][1] is not value]
        found |= {name.rpartition(".")[0] for name, *_ in separate}
    return found


def common_heads(found: Sequence[Attention]) -> int | None:
    return next((part.num_heads for part in found if part.num_heads), None)
