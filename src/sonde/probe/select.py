"""Which sites to record: by glob, by list of globs, by module type, or by a function of name and module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sonde.errors import UsageError
from sonde.schema.names import matches_any

Chooser = Callable[[str, str, Any], bool]
"""(site, alias or same, module that owns it) -> whether to record it."""


def chooser(sites: object) -> Chooser:
    """Make one function of whatever the user gave as `sites=`.

    >>> choose = chooser(["layers.*.mlp", "!layers.0.*"])
    >>> choose("layers.3.mlp", "layers.3.mlp", None), choose("layers.0.mlp", "layers.0.mlp", None)
    (True, False)
    """
    if isinstance(sites, str | type):
        return chooser([sites])
    if callable(sites):
        return _by_function(sites)
    if isinstance(sites, Iterable):
        return _by_list(list(sites))
    raise UsageError(
        f"sites= takes a glob, a list of globs and module types, or a function of name and module; got {sites!r}."
    )


def _by_list(items: list[object]) -> Chooser:
    wanted = [item for item in items if isinstance(item, str) and not item.startswith("!")]
    unwanted = [item[1:] for item in items if isinstance(item, str) and item.startswith("!")]
    types = tuple(item for item in items if isinstance(item, type))
    wrong = [item for item in items if not isinstance(item, str | type)]
    if wrong:
        raise UsageError(
            f"sites= takes globs such as 'layers.*.mlp' and module types such as nn.Linear; got {wrong[0]!r}."
        )
    everything = not wanted and not types

    def choose(site: str, alias: str, module: Any) -> bool:
        if matches_any(unwanted, site) or matches_any(unwanted, alias):
            return False
        by_name = matches_any(wanted, site) or matches_any(wanted, alias)
        return everything or by_name or (bool(types) and isinstance(module, types))

    return choose


def _by_function(function: Callable[..., Any]) -> Chooser:
    def choose(site: str, alias: str, module: Any) -> bool:
        del alias
        return bool(function(site, module))

    return choose
