"""Flax, linen and nnx, with Optax: train steps as its guides write them, compiled, with sketches inside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sonde
from comparison import compare
from examination import Answers, faults_of, python_warnings, record, sonde_words
from ledger import Ledger
from synthetic import clusters
from tally import EXACT, Expected

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import linen, nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

STEPS = 40


class Recorder:
    """What a program calls: `made` after each step. This one does nothing."""

    def wrap(self, optimizer: Any) -> Any:
        return optimizer

    def describe(self, *given: Any) -> None:
        """Tell the names of the layers."""

    def made(
        self, state: Any, before: Any, after: Any, grads: Any, loss: Any, *, used: float = 1.0, updates: Any = None
    ) -> None:
        """`used` is what clipping multiplied the gradients by before they are recorded."""


class Witness(Recorder, Ledger):
    """With the arrays that the program's own step returns."""

    def __init__(self) -> None:
        Ledger.__init__(self)

    def made(
        self, state: Any, before: Any, after: Any, grads: Any, loss: Any, *, used: float = 1.0, updates: Any = None
    ) -> None:
        self.step += 1
        made, new, found, moved = named(before), named(after), named(grads), named(updates)
        for name, value in made.items():
            self.add("param", name, value)
            self.gradient(name, used * found[name].astype(np.float64), raw=used * found[name].astype(np.float64))
            self.update(name, value, new[name], is_sum=updates is None, moved=moved.get(name))
        self.scalars["loss", self.step] = Expected(float(loss), EXACT)


class Recording(Recorder):
    """With sonde."""

    def wrap(self, optimizer: Any) -> Any:
        return sonde.jax.recorded(optimizer)

    def describe(self, *given: Any) -> None:
        sonde.jax.describe(*given)

    def made(
        self, state: Any, before: Any, after: Any, grads: Any, loss: Any, *, used: float = 1.0, updates: Any = None
    ) -> None:
        sonde.jax.step(state, loss=loss)


def named(tree: Any) -> dict[str, Any]:
    """`layers.0.kernel`: the keys on the way to each array."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        keys = [key for key in keys if key not in ("value", "raw_value")]
        found[".".join(keys)] = np.asarray(leaf)
    return found


def batches() -> Any:
    return ((x.numpy(), y.numpy()) for x, y in islice(clusters(), STEPS))


def cross_entropy(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Net(linen.Module):
    """Two layers, with dropout."""

    dropout: float = 0.0

    @linen.compact
    def __call__(self, x: Any, *, train: bool = True) -> Any:
        hidden = linen.relu(linen.LayerNorm(name="norm")(linen.Dense(32, name="first")(x)))
        hidden = linen.Dropout(self.dropout, deterministic=not train)(hidden)
        return linen.Dense(4, name="out")(hidden)


Result = dict[str, Any]
Train = Callable[[Recorder], Result]


def linen_loop(make: Callable[[Recorder], Any], *, dropout: float = 0.0, clip: float | None = None) -> Train:
    """`make` gives the optimizer, with what is recorded inside of it."""

    def train(recorder: Recorder) -> Result:
        net, tx = Net(dropout), make(recorder)
        params = net.init(jax.random.key(0), jnp.ones((1, 12)), train=False)["params"]
        recorder.describe(net, jnp.ones((1, 12)))
        opt_state = tx.init(params)

        @jax.jit
        def step(params: Any, opt_state: Any, key: Any, x: Any, y: Any) -> Any:
            loss, grads = jax.value_and_grad(
                lambda p: cross_entropy(net.apply({"params": p}, x, rngs={"dropout": key}), y)
            )(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, grads, updates, loss

        losses = []
        for number, (x, y) in enumerate(batches()):
            before = jax.tree_util.tree_map(np.array, params)
            params, opt_state, grads, updates, loss = step(params, opt_state, jax.random.key(number), x, y)
            norm = float(optax.global_norm(grads))
            used = 1.0 if clip is None else min(1.0, clip / norm)
            recorder.made(opt_state, before, params, grads, loss, used=used, updates=updates)
            losses.append(float(loss))
        return {"params": named(params), "losses": losses}

    return train


def train_state(recorder: Recorder) -> Result:
    """`TrainState.apply_gradients`, the state given back to the memory it came from."""
    net = Net()
    params = net.init(jax.random.key(0), jnp.ones((1, 12)))["params"]
    state = TrainState.create(apply_fn=net.apply, params=params, tx=recorder.wrap(optax.adamw(3e-3)))

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: cross_entropy(state.apply_fn({"params": p}, x), y))(state.params)
        return state.apply_gradients(grads=grads), grads, loss

    losses = []
    for x, y in batches():
        before = jax.tree_util.tree_map(np.array, state.params)
        state, grads, loss = step(state, x, y)
        recorder.made(state, before, state.params, grads, loss)
        losses.append(float(loss))
    return {"params": named(state.params), "losses": losses}


class Blocks(nnx.Module):
    """Two layers in nnx."""

    def __init__(self, rngs: Any) -> None:
        self.first, self.norm, self.out = (
            nnx.Linear(12, 32, rngs=rngs),
            nnx.LayerNorm(32, rngs=rngs),
            nnx.Linear(32, 4, rngs=rngs),
        )

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.relu(self.norm(self.first(x))))


def nnx_loop(recorder: Recorder) -> Result:
    model = Blocks(nnx.Rngs(0))
    recorder.describe(model)
    optimizer = nnx.Optimizer(model, recorder.wrap(optax.adamw(3e-3)), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x), y))(model)
        optimizer.update(model, grads)
        return loss, grads

    losses = []
    for x, y in batches():
        before = jax.tree_util.tree_map(np.array, nnx.state(model, nnx.Param))
        loss, grads = step(model, optimizer, x, y)
        recorder.made(optimizer, before, nnx.state(model, nnx.Param), grads, loss)
        losses.append(float(loss))
    return {"params": named(nnx.state(model, nnx.Param)), "losses": losses}


@dataclass(frozen=True)
class Program:
    """`is_quick`: one of those that every change is checked with."""

    name: str
    train: Train
    is_quick: bool = False


PROGRAMS = (
    Program("Flax linen, own update", linen_loop(lambda r: r.wrap(optax.adamw(3e-3))), is_quick=True),
    Program(
        "Flax linen, recorded after clipping, dropout and a schedule",
        linen_loop(
            lambda r: optax.chain(
                optax.clip_by_global_norm(0.5), r.wrap(optax.sgd(optax.cosine_decay_schedule(0.2, STEPS), momentum=0.9))
            ),
            dropout=0.1,
            clip=0.5,
        ),
    ),
    Program(
        "Flax linen, recorded before clipping",
        linen_loop(lambda r: r.wrap(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-3)))),
    ),
    Program(
        "Flax linen, Optax accumulates",
        linen_loop(lambda r: r.wrap(optax.MultiSteps(optax.adam(1e-2), 4).gradient_transformation())),
    ),
    Program("Flax linen, TrainState with donated buffers", train_state),
    Program("Flax nnx", nnx_loop, is_quick=True),
)


def examine(program: Program, folder: Path) -> Answers:
    began = time.perf_counter()
    answers, witness = Answers(program.name, "trainer"), Witness()
    with python_warnings() as usual:
        plain = program.train(witness)
    with python_warnings() as now, sonde_words() as words, sonde.init(project="flax", dir=folder):
        watched = program.train(Recording())
    run = sonde.open("latest", dir=folder)
    answers.not_identical = [
        f"param {name}"
        for name in plain["params"]
        if plain["params"][name].tobytes() != watched["params"][name].tobytes()
    ]
    answers.not_identical += [f"loss {n}" for n, loss in enumerate(plain["losses"]) if loss != watched["losses"][n]]
    answers.num_identical = len(plain["params"]) + len(plain["losses"])
    answers.identity_of = "parameters and losses"
    answers.values = compare(run, witness, kinds=("param", "grad", "update"))
    answers.findings = faults_of(run)
    answers.warnings = [*words, *run.warnings, *sorted(now - usual)]
    answers.values.different += [str(problem) for problem in run.verify()]
    if (run.status, run.last_step) != ("finished", STEPS - 1):
        answers.values.different.append(f"{run.status} after step {run.last_step}")
    answers.num_steps = STEPS
    answers.num_parameters = sum(value.size for value in plain["params"].values())
    answers.seconds = time.perf_counter() - began
    record(answers)
    return answers


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.is_quick else []) for p in PROGRAMS],
)
def test_flax(program: Program, tmp_path: Path) -> None:
    examine(program, tmp_path).check()
