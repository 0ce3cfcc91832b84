"""Common names for series of runs from different frameworks: a Keras kernel and the matching PyTorch weight.

Statistics do not depend on the layout of a tensor, so only names have to change; tensors that are split into several
pieces in one framework have no counterpart here and keep their own name.
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
    """The names in a of the parameters of b; empty if both use one framework, or nothing can be matched."""
    if not a or not b or detect(a) == detect(b):
        return {}
    return {
        pair.b.parts[0].source: pair.a.parts[0].source
        for pair in match_models(a, b).pairs
        if pair.a.is_as_stored and pair.b.is_as_stored
    }


def renamed(series: Mapping[str, Value], names: Mapping[str, str]) -> dict[str, Value]:
    """Rename series `kind/site/stat` of parameters to the other framework's names; others are unchanged.

    >>> renamed({"grad/dense.kernel/norm": 1, "loss": 2}, {"dense.kernel": "0.weight"})
    {'grad/0.weight/norm': 1, 'loss': 2}
    """
    return {_rename(key, names): value for key, value in series.items()}


def _rename(key: str, names: Mapping[str, str]) -> str:
    kind, _, rest = key.partition("/")
    site, _, stat = rest.rpartition("/")
    return f"{kind}/{other_site(kind, site, names)}/{stat}" if site else key


def other_site(kind: str, site: str, names: Mapping[str, str]) -> str:
    """The name of a site in the other framework, if it has one."""
    if kind in _OF_PARAMETERS:
        return names.get(site, site)
    owner, _, state = site.rpartition(".")
    return f"{names[owner]}.{state}" if kind == "optim" and owner in names else site  # optim/dense.kernel.exp_avg
