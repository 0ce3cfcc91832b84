"""The modules of a Flax model, in the order in which they are called. Computes nothing: only shapes pass through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from sonde.errors import UsageError

ROOT = "model"


class Called(NamedTuple):
    """A module, by its name in the parameter tree."""

    name: str
    type: str
    calls: int = 1


def modules_of(model: Any, *inputs: Any, **options: Any) -> list[Called]:
    """Modules of an `nnx` model in source order; of a `linen` model in the order in which these inputs pass them."""
    from flax import linen, nnx

    if isinstance(model, nnx.Module):
        return [Called(ROOT, type(model).__name__), *_written(model, "", {id(model)})]
    if isinstance(model, linen.Module):
        if not inputs and not options:
            raise UsageError("describe() needs an input to call a linen model with: describe(model, x).")
        return _called(model, inputs, options)
    raise UsageError(f"describe() needs a Flax model (nnx or linen); got {type(model).__name__}.")


def _called(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> list[Called]:
    from flax import linen

    found: dict[str, Called] = {}

    def look(original: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name == "__call__":
            name = ".".join(context.module.path) or ROOT
            known = found.get(name, Called(name, type(context.module).__name__, 0))
            found[name] = known._replace(calls=known.calls + 1)
        return original(*args, **kwargs)

    keys = {name: jax.random.key(0) for name in ("params", "dropout")}
    with linen.intercept_methods(look):
        jax.eval_shape(lambda *args: model.init(keys, *args, **options), *inputs)
    return list(found.values())


def _written(part: Any, prefix: str, seen: set[int]) -> Iterator[Called]:
    """The modules in a module, in a list or in a mapping of modules."""
    from flax import nnx

    for key, child in _items(part):
        if id(child) in seen:
            continue
        name = f"{prefix}{key}"
        if isinstance(child, nnx.Module):
            seen.add(id(child))
            if not hasattr(child, "__iter__"):  # nnx.List and nnx.Dict are modules that are never called
                yield Called(name, type(child).__name__)
        if isinstance(child, nnx.Module | list | tuple | dict):
            yield from _written(child, f"{name}.", seen)


def _items(part: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(part, list | tuple):
        yield from enumerate(part)
        return
    for key, child in (part if isinstance(part, dict) else vars(part)).items():
        if not str(key).startswith("_"):
            yield key, child
