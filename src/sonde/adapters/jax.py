"""JAX, Flax and Optax: sketches are computed inside `jit` and handed over outside.

    import sonde.adapters.jax as sonde_jax            # the same as sonde.jax

    tx = sonde_jax.recorded(optax.adamw(3e-4))        # records parameters, gradients and updates of every step

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    sonde.init(project="jax")
    for batch in batches:
        params, opt_state, loss = train_step(params, opt_state, batch)
        sonde_jax.step(opt_state, loss=loss)          # waits for nothing

Any tree can be sketched by hand: `sketch({"grad": grads})` inside `jit`, `step(sketches)` outside. Of sharded arrays
the sketch is of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from sonde.errors import MissingPackageError, UsageError

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise MissingPackageError("jax", "jax", "sonde.jax") from error

from sonde.reduce.jax import Sketches, sketch_arrays, to_rows
from sonde.schema.names import KINDS, site_name
from sonde.schema.records import Site
from sonde.session import Session, init
from sonde.session.current import active_session
from sonde.session.handed import put_rows, put_scalars

__all__ = ["Sketches", "recorded", "sketch", "step"]


def sketch(tree: Any, kind: str | None = None) -> Sketches:
    """Sketches of every array of a tree; a small tree that a jitted function may return.

    `sketch({"grad": grads, "param": params})` names the kinds; `sketch(grads, kind="grad")` names the one.
    """
    if kind is not None:
        return sketch_arrays(_named(kind, tree))
    if isinstance(tree, Mapping) and tree and all(key in KINDS for key in tree):
        return sketch_arrays(item for key, part in tree.items() for item in _named(key, part))
    raise UsageError(
        f'sketch() needs kinds: sketch({{"grad": grads}}) or sketch(grads, kind="grad"). Known: {", ".join(KINDS)}.'
    )


class RecordedState(NamedTuple):
    """The state of the optimizer inside, and what its last step looked like."""

    inner: Any
    sketches: Sketches


def recorded(optimizer: Any) -> Any:
    """An Optax optimizer that sketches parameters, gradients and updates in each of its steps, and changes none.

    Its state holds the sketches: give it to `step`.
    """
    try:
        import optax
    except ImportError as error:
        raise MissingPackageError("optax", "jax", "recorded()") from error

    def begin(params: Any) -> RecordedState:
        return RecordedState(optimizer.init(params), _sketches(params, params, params))

    def update(grads: Any, state: RecordedState, params: Any = None, **extra: Any) -> tuple[Any, RecordedState]:
        if extra:
            updates, inner = optimizer.update(grads, state.inner, params, **extra)
        else:
            updates, inner = optimizer.update(grads, state.inner, params)
        return updates, RecordedState(inner, _sketches(params, grads, updates))

    return optax.GradientTransformationExtraArgs(begin, update)


def step(tree: Any = None, /, **scalars: Any) -> None:
    """End the step: record the sketches in a tree (an optimizer's state, what `sketch` returned) and these numbers.

    Begins a run where there is none.
    """
    session = active_session() or init()
    if not isinstance(session, Session):
        return
    try:
        for sketches in map(_kept, _found(tree)):
            put_rows(session, _sites(sketches), partial(to_rows, sketches))
        late = {name: _kept(value) for name, value in scalars.items() if isinstance(value, jax.Array)}
        session.log({name: value for name, value in scalars.items() if name not in late})
        if late:
            put_scalars(session, late)
    except Exception as error:  # noqa: BLE001 - our failure must not end their training
        session.breaker("jax", error)
    session.step()


def _sketches(params: Any, grads: Any, updates: Any) -> Sketches:
    parts = {"grad": grads, "update": updates, **({"param": params} if params is not None else {})}
    return sketch(parts)


def _kept(tree: Any) -> Any:
    """A copy of these few numbers, on its way to the host: the next step may be given the memory they are in."""
    copied = jax.tree_util.tree_map(partial(jnp.array, copy=True), tree)
    for leaf in jax.tree_util.tree_leaves(copied):
        leaf.copy_to_host_async()
    return copied


def _found(tree: Any) -> list[Sketches]:
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=lambda node: isinstance(node, Sketches))
    return [leaf for leaf in leaves if isinstance(leaf, Sketches)]


def _sites(sketches: Sketches) -> list[Site]:
    columns = zip(sketches.names, sketches.shapes, sketches.dtypes, strict=True)
    return [Site(kind=kind, name=name, shape=shape, dtype=dtype) for (kind, name), shape, dtype in columns]


def _named(kind: str, tree: Any) -> Iterator[tuple[str, str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            yield kind, _site(path), leaf


def _site(path: tuple[Any, ...]) -> str:
    """`layers.0.kernel`: the keys on the way to a leaf, without Flax's wrappers."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    if keys and keys[0] == "params":
        keys = keys[1:]
    if len(keys) > 1 and keys[-1] in ("value", "raw_value"):
        keys = keys[:-1]
    return site_name(".".join(keys) or "value")
