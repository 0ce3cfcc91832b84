"""The functions of `sonde.jax`: sketch trees inside `jit`, and record them in a session outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from sonde.errors import MissingPackageError, UnknownNameError, UsageError

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    raise MissingPackageError("jax", "jax", "sonde.jax") from error

from sonde.adapters.jax.flax_modules import modules_of
from sonde.adapters.jax.kept_snapshots import KEPT_KINDS, KeptSnapshots
from sonde.adapters.jax.sketches import Sketches, sketch_arrays, to_rows
from sonde.adapters.jax.structure import structure_of, write_structure
from sonde.budget.compiled_meter import CompiledMeter
from sonde.probe.optimizer.hyperparameters import Hyperparameters
from sonde.probe.schedule import When
from sonde.schema.names import KINDS, site_name
from sonde.schema.packages import require
from sonde.schema.records import Site
from sonde.session import Session, init
from sonde.session.entry.current import active_session
from sonde.session.entry.external import put_rows, put_settings
from sonde.session.snapshot_plan import Snapshots
from sonde.session.snapshots.external import check_plan

_NOTHING = "step() got no sketches: pass the state of an optimizer wrapped in recorded(), or the result of sketch()."
_OTHER_NAMES: Final = {"learning_rate": "lr", "b1": "beta1", "b2": "beta2"}
_hyperparameters: WeakKeyDictionary[Session, Hyperparameters] = WeakKeyDictionary()
_kept_snapshots: WeakKeyDictionary[Session, KeptSnapshots] = WeakKeyDictionary()
_UNKNOWN = (
    "sketches are part of the compiled step; use recorded(..., every=10) to have steps without them to compare with"
)


def sketch(tree: Any, kind: str | None = None) -> Sketches:
    """Sketches of every array of a tree; a small tree that a jitted function may return.

    `sketch({"grad": grads, "param": params})` names the kinds; `sketch(grads, kind="grad")` names one kind for all.
    """
    if kind is not None:
        return sketch_arrays(_named(kind, tree))
    if isinstance(tree, Mapping) and tree and all(key in KINDS for key in tree):
        return sketch_arrays(item for key, part in tree.items() for item in _named(key, part))
    raise UsageError(
        f'sketch() needs kinds: sketch({{"grad": grads}}) or sketch(grads, kind="grad"). Known: {", ".join(KINDS)}.'
    )


class RecordedState(NamedTuple):
    """The state of the optimizer inside, the sketches of the last recorded step, and the number of steps."""

    inner: Any
    sketches: Sketches
    count: Any


def recorded(optimizer: Any, *, every: int = 1) -> Any:
    """Wrap an Optax optimizer so that it sketches parameters, gradients and updates in every step, or in one of
    `every`, without changing them.

    Its state holds the sketches: pass it to `step`.
    """
    if every < 1:
        raise UsageError(f"recorded(): every= must be at least 1; got {every}.")
    optax = require("optax", "jax", "recorded()")

    def begin(params: Any) -> RecordedState:
        forms = jax.eval_shape(_sketches, params, params, params)  # nothing is computed before the first step
        empty = jax.tree_util.tree_map(lambda form: jnp.zeros(form.shape, form.dtype), forms)
        return RecordedState(optimizer.init(params), empty, jnp.zeros((), jnp.int32))

    def update(grads: Any, state: RecordedState, params: Any = None, **extra: Any) -> tuple[Any, RecordedState]:
        if extra:
            updates, inner = optimizer.update(grads, state.inner, params, **extra)
        else:
            updates, inner = optimizer.update(grads, state.inner, params)
        sketches = _every(every, state, lambda: _sketches(params, grads, updates))
        return updates, RecordedState(inner, sketches, state.count + 1)

    return optax.GradientTransformationExtraArgs(begin, update)


def step(tree: Any = None, /, **scalars: Any) -> None:
    """End the step: record these numbers and the sketches in a tree (an optimizer's state, an `nnx.Optimizer`, a
    `TrainState`, the result of `sketch`).

    Starts a run if there is none.
    """
    session = active_session() or init()
    if not isinstance(session, Session):
        return
    try:
        found, injected = _found(tree)
        if tree is not None and not found:
            session.recording.warn_once("jax sketches", _NOTHING)
        for place, sketches in enumerate(map(_kept, found)):
            sites = _sites(sketches)
            put_rows(session.recording, sites, partial(to_rows, sketches))
            if not place:
                _measure(session, sketches)
            if structure_of(session).is_new(sketches.names):
                structure_of(session).add(sites)
                write_structure(session)
        if injected:
            _put_injected(session, injected)
        session.log(scalars)
    except Exception as error:  # noqa: BLE001 - our failure must not end their training
        session.recording.breaker("jax", error)
    if session in _kept_snapshots:
        _guarded_end(session)
    session.step()


def snapshots(plan: Snapshots | When = True, /) -> None:
    """Keep whole tensors of chosen steps: `snapshots(sonde.Snapshots(when=sonde.every(100), kinds="param,grad"))`.

    The plan says which steps and kinds; `keep` passes the tensors.
    """
    checked = check_plan(plan, KEPT_KINDS)
    session = active_session() or init()
    if isinstance(session, Session):
        _kept_snapshots[session] = KeptSnapshots(session, checked)


def keep(**trees: Any) -> bool:
    """Pass trees of arrays for a snapshot of the current step, by kind: `keep(param=params, grad=grads)`.

    Call it before `step`, and before a compiled step that donates these arrays. On steps without a snapshot it does
    nothing. Returns whether this step has one.
    """
    session = active_session() or init()
    if not isinstance(session, Session):
        return False
    try:
        return _snapshots_of(session).keep({kind: partial(_arrays, kind, tree) for kind, tree in _checked(trees)})
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - our failure must not end their training
        session.recording.breaker("jax snapshot", error)
        return False


def _guarded_end(session: Session) -> None:
    try:
        _kept_snapshots[session].end()
    except Exception as error:  # noqa: BLE001 - our failure must not end their training
        session.recording.breaker("jax snapshot", error)


def _arrays(kind: str, tree: Any) -> list[tuple[str, Any]]:
    """The arrays of a tree by site. What `recorded` adds to the state of an optimizer is left out."""
    found: list[tuple[str, Any]] = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, RecordedState))[
        0
    ]:
        if isinstance(leaf, RecordedState):
            place = f"{_site(path)}." if path else ""
            found += [(place + name, array) for name, array in _arrays(kind, leaf.inner)]
        else:
            found += [(_site(path), array) for _, _, array in _named(kind, leaf)]
    return found


def _checked(trees: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for kind, tree in trees.items():
        if kind not in KEPT_KINDS:
            raise UnknownNameError("snapshot kind", kind, KEPT_KINDS)
        yield kind, tree


def _snapshots_of(session: Session) -> KeptSnapshots:
    if session not in _kept_snapshots:
        _kept_snapshots[session] = KeptSnapshots(session, None)
    return _kept_snapshots[session]


def describe(model: Any, *inputs: Any, **options: Any) -> None:
    """Record the modules of a Flax model, in the order in which they are called, in model.json.

    `describe(model)` for nnx, `describe(model, x)` for linen, with the inputs of the model. Computes nothing.
    """
    modules = modules_of(model, *inputs, **options)
    session = active_session() or init()
    if isinstance(session, Session):
        structure_of(session).modules = [(module.name, module.type, module.calls) for module in modules]
        write_structure(session)


def _measure(session: Session, sketches: Sketches) -> None:
    """The cost of recording, if some steps run without it."""
    governing = session.steps.training.governing
    if not isinstance(governing.meter, CompiledMeter):
        governing.meter, governing.is_together, governing.unknown = CompiledMeter(), True, _UNKNOWN
    governing.meter.begin(time.perf_counter())
    governing.meter.note(is_recorded=sketches.is_new, result=sketches.is_new)


def _every(every: int, state: RecordedState, look: Callable[[], Sketches]) -> Sketches:
    if every == 1:
        return look()
    # The other steps pass on the old sketches, and mark them as old.
    old = replace(state.sketches, is_new=jnp.asarray(False))
    # `init` uses the types of the parameters; those of gradients and updates are known after one step.
    if not _is_alike(old, jax.eval_shape(look)):
        return look()
    found: Sketches = jax.lax.cond(state.count % every == 0, look, lambda: old)
    return found


def _is_alike(a: Any, b: Any) -> bool:
    forms: list[tuple[Any, Any]] = [jax.tree_util.tree_flatten(tree) for tree in (a, b)]
    (mine, my_form), (others, other_form) = forms
    if my_form != other_form:
        return False
    return all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(mine, others, strict=True))


def _sketches(params: Any, grads: Any, updates: Any) -> Sketches:
    parts = {"grad": grads, "update": updates, **({"param": params} if params is not None else {})}
    return sketch(parts)


def _kept(tree: Any) -> Any:
    """Start copying these few numbers to the host: the next step may reuse their memory."""
    tree = jax.tree_util.tree_map(_value, tree, is_leaf=_is_variable)
    if isinstance(tree, Sketches) and tree.counts.ndim == 3:  # of pmap, whose devices have one each
        tree = jax.tree_util.tree_map(lambda x: x[0], tree)
    copied = jax.tree_util.tree_map(partial(jnp.array, copy=True), tree)
    for leaf in jax.tree_util.tree_leaves(copied):
        leaf.copy_to_host_async()
    return copied


def _is_variable(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) and hasattr(leaf, "get_value")


def _value(leaf: Any) -> Any:
    """nnx keeps each array of an optimizer's state in a separate variable."""
    return leaf.get_value() if _is_variable(leaf) else leaf


def _found(tree: Any) -> tuple[list[Sketches], list[Mapping[str, Any]]]:
    """The sketches in a tree, and the hyperparameters that `optax.inject_hyperparams` keeps in it."""
    tree = getattr(tree, "opt_state", tree)  # an optimizer of nnx, a TrainState
    leaves = jax.tree_util.tree_leaves(tree, is_leaf=lambda node: isinstance(node, Sketches) or _is_injected(node))
    sketches = [leaf for leaf in leaves if isinstance(leaf, Sketches)]
    injected = []
    for state in filter(_is_injected, leaves):
        inner, others = _found(state.inner_state)
        sketches += inner
        injected += [state.hyperparams, *others]
    return sketches, injected


def _is_injected(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "hyperparams") and hasattr(node, "inner_state")


def _put_injected(session: Session, injected: Sequence[Mapping[str, Any]]) -> None:
    """A second optimizer in the same state, as in `optax.partition`, is a second group."""
    groups: list[dict[str, Any]] = []
    for state in injected:
        named = {_OTHER_NAMES.get(name, name): _value(value) for name, value in state.items()}
        named = {name: value for name, value in named.items() if jnp.issubdtype(jnp.result_type(value), jnp.number)}
        group = next((group for group in groups if not group.keys() & named.keys()), None)
        groups.append(named) if group is None else group.update(named)
    names = [f"group{i}/{name}" if i else name for i, group in enumerate(groups) for name in group]
    stacked = jnp.stack([jnp.ravel(value)[0].astype(float) for group in groups for value in group.values()])
    stacked.copy_to_host_async()
    known = _hyperparameters.setdefault(session, Hyperparameters())
    put_settings(session.recording, known, names, partial(np.asarray, stacked))


def _sites(sketches: Sketches) -> list[Site]:
    columns = zip(sketches.names, sketches.shapes, sketches.dtypes, strict=True)
    return [Site(kind=kind, name=name, shape=shape, dtype=dtype) for (kind, name), shape, dtype in columns]


def _named(kind: str, tree: Any) -> Iterator[tuple[str, str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            yield kind, _site(path), leaf


def _site(path: tuple[Any, ...]) -> str:
    """`layers.0.kernel`: the keys on the path to a leaf, without Flax's wrappers."""
    keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
    if keys and keys[0] == "params":
        keys = keys[1:]
    if len(keys) > 1 and keys[-1] in ("value", "raw_value"):
        keys = keys[:-1]
    return site_name(".".join(keys) or "value")
