"""Series of two runs of different frameworks under one name: a Keras layer's kernel beside a PyTorch layer's weight.

Statistics do not see how a tensor lies, so a name is all that has to change; tensors that are kept in several pieces
in one framework have no counterpart here and stay under their own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

from sonde.schema.frameworks.layouts import Shape, detect
from sonde.schema.frameworks.match import match_models

Value = TypeVar("Value")
Sites = Mapping[str, Shape]
"""Shapes of a model's parameters by name."""

_OF_PARAMETERS: Final = ("param", "grad", "update")


def other_names(a: Sites, b: Sites) -> dict[str, str]:
    """What the parameters of b are called in a; empty where both are of one framework, or nothing can be matched."""
    if not a or not b or detect(a) == detect(b):
        return {}
    return {
        pair.b.parts[0].source: pair.a.parts[0].source
        for pair in match_models(a, b).pairs
        if pair.a.is_as_stored and pair.b.is_as_stored
    }


def renamed(series: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    """Series `kind/site/stat` of parameters under the other framework's names; all others as they are.

    >>> renamed({"grad/dense.kernel/norm": 1, "loss": 2}, {"dense.kernel": "0.weight"})
    {'grad/0.weight/norm': 1, 'loss': 2}
    """
    return {_rename(key, names): value for key, value in series.items()}


def _rename(key: str, names: Mapping[str, str]) -> str:
    kind, _, rest = key.partition("/")
    site, _, stat = rest.rpartition("/")
    return f"{kind}/{other_site(kind, site, names)}/{stat}" if site else key


def other_site(kind: str, site: str, names: Mapping[str, str]) -> str:
    """A site under its name in the other framework, where it has one."""
    if kind in _OF_PARAMETERS:
        return names.get(site, site)
    owner, _, state = site.rpartition(".")
    return f"{names[owner]}.{state}" if kind == "optim" and owner in names else site  # optim/dense.kernel.exp_avg
