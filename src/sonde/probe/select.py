"""Selection of sites: by glob, regular expression or module type, a list of these, or a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

from sonde.errors import UsageError
from sonde.schema.names import matches_any

if TYPE_CHECKING:
    from torch import nn

Sites: TypeAlias = (
    "str | re.Pattern[str] | type[nn.Module] | Iterable[str | re.Pattern[str] | type[nn.Module]]"
    " | Callable[[str, nn.Module], object]"
)
"""A glob, a regular expression, a module type, several of these, or a function of name and module."""
Chooser = Callable[[str, str, Any], bool]
"""(site, alias or the same, owning module) -> whether to record it."""


def chooser(sites: object) -> Chooser:
    """Turn the value of `sites=` into one function.

    >>> choose = chooser(["layers.*.mlp", "!layers.0.*"])
    >>> choose("layers.3.mlp", "layers.3.mlp", None), choose("layers.0.mlp", "layers.0.mlp", None)
    (True, False)
    """
    if isinstance(sites, str | type | re.Pattern):
        return chooser([sites])
    if callable(sites):
        return _by_function(sites)
    if isinstance(sites, Iterable):
        return _by_list(list(sites))
    raise UsageError(
        "sites= must be a glob, a regular expression, a module type, a list of these, or a function of name and "
        f"module; got {sites!r}."
    )


def is_chosen(choose: Chooser, name: str, aliases: Iterable[str], modules: Iterable[Any]) -> bool:
    """Whether a site is selected, by any of its names and any of the modules that own it."""
    owners = list(modules)
    return any(choose(name, alias, module) for alias in (name, *aliases) for module in owners)


def _by_list(items: list[object]) -> Chooser:
    wanted = [item for item in items if isinstance(item, str) and not item.startswith("!")]
    unwanted = [item[1:] for item in items if isinstance(item, str) and item.startswith("!")]
    types = tuple(item for item in items if isinstance(item, type))
    patterns = [item for item in items if isinstance(item, re.Pattern)]
    wrong = [item for item in items if not isinstance(item, str | type | re.Pattern)]
    if wrong:
        raise UsageError(
            f"sites= may hold globs such as 'layers.*.mlp' and module types such as nn.Linear; got {wrong[0]!r}."
        )
    everything = not wanted and not types and not patterns

    def choose(site: str, alias: str, module: Any) -> bool:
        if matches_any(unwanted, site) or matches_any(unwanted, alias):
            return False
        by_name = any(matches_any(wanted, name) or any(p.search(name) for p in patterns) for name in (site, alias))
        return everything or by_name or (bool(types) and _is_of(module, types))

    return choose


def _is_of(module: Any, types: tuple[type, ...]) -> bool:
    if not hasattr(module, "original_name"):
        return isinstance(module, types)
    from sonde.probe.model import class_of  # a scripted module, which only torch can have created

    return issubclass(class_of(module), types)


def _by_function(function: Callable[..., Any]) -> Chooser:
    def choose(site: str, alias: str, module: Any) -> bool:
        del alias
        return bool(function(site, module))

    return choose
