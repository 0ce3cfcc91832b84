"""The description of a run that `init` takes, as plain values: config, tags, notes and name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sonde.errors import UsageError
from sonde.schema.records import fields_of, text_of

_CONVERSIONS: Final = ("model_dump", "to_dict", "as_dict")
"""Methods that turn configuration objects of pydantic, transformers, ml_collections and others into mappings."""


def as_config(config: Any) -> dict[str, Any]:
    """A config as a mapping: from a mapping, a dataclass, an argparse namespace, or an object that converts to one.

    >>> from argparse import Namespace
    >>> as_config(Namespace(lr=0.1))
    {'lr': 0.1}
    """
    if config is None:
        return {}
    found = fields_of(config)
    for method in _CONVERSIONS:
        if found is None and callable(getattr(config, method, None)):
            found = fields_of(getattr(config, method)())
    if found is None and isinstance(config, list | tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in config):
        found = dict(config)
    if found is None:
        raise UsageError(
            f'config= must be a mapping such as {{"lr": 3e-4}}, a dataclass or parsed arguments; got '
            f"{type(config).__name__}."
        )
    return {text_of(key): value for key, value in found.items()}


def as_tags(tags: Any) -> list[str]:
    """
    >>> as_tags("baseline"), as_tags(["a", 1]), as_tags(None)
    (['baseline'], ['a', '1'], [])
    """
    if tags is None:
        return []
    if isinstance(tags, str | bytes) or not isinstance(tags, Iterable):
        tags = [tags]
    elif isinstance(tags, Mapping):
        tags = [f"{text_of(key)}={text_of(value)}" for key, value in tags.items()]
    return [text_of(tag) for tag in tags]


def as_text(text: Any) -> str:
    """Notes or a name as a string; None becomes an empty string."""
    return "" if text is None else text_of(text)
