"""Keras on the back-end of this process: each program is trained as it is, with a witness, and with sonde.

Run by test_trainers_keras.py, once for each back-end; prints the answers as JSON. The witness copies every variable
before and after each step, and computes gradients and activations once more, eagerly, from those copies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from keras import layers, ops

import sonde
from comparison import KINDS, compare
from examination import Answers, faults_of, python_warnings, sonde_words
from ledger import Ledger
from sonde.adapters.keras import SondeCallback
from synthetic import clusters
from tally import EXACT, Expected

BACKEND = keras.backend.backend()
STEPS = 40
BATCH = 32


class Witness(Ledger, keras.callbacks.Callback):
    """What `compare` asks of an oracle, of a Keras model."""

    def __init__(self, *, is_deterministic: bool = True, clipnorm: float | None = None) -> None:
        Ledger.__init__(self)
        keras.callbacks.Callback.__init__(self)
        self.is_deterministic, self.clipnorm = is_deterministic, clipnorm
        self.before: dict[str, Any] = {}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.begin(*batch_of(batch))

    def begin(self, x: Any, y: Any) -> None:
        """This batch comes next."""
        self.step += 1
        self.before = variables(self.model)
        for name, value in self.before.items():
            self.add("param", name, value)
        rate = float(ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.scalars["optim/lr", self.step] = Expected(rate, 1e-6 * rate + 1e-9)
        if self.is_deterministic:
            self._again(x, y)

    def _again(self, x: Any, y: Any) -> None:
        loss, grads = loss_and_gradients(self.model, x, y)
        self.scalars["loss", self.step] = Expected(loss, 1e-5 * abs(loss))
        norm = np.sqrt(sum(np.square(grad).sum() for grad in grads))
        factor = 1.0 if self.clipnorm is None else min(1.0, self.clipnorm / norm)
        for name, grad in zip(self.before, grads, strict=True):
            self.gradient(name, factor * grad, raw=grad)
        for name, value in outputs(self.model, x).items():
            self.add("act", name, value)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for name, value in variables(self.model).items():
            self.update(name, self.before[name], value)
        for name, value in states(self.model).items():
            self.add("optim", name, value)
        if logs and "accuracy" in logs:
            self.scalars["accuracy", self.step] = Expected(float(logs["accuracy"]), EXACT)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name in [name for name in logs or {} if name.startswith("val_")]:
            self.scalars[name, self.step] = Expected(float(logs[name]), EXACT)


def named(model: Any, variable: Any) -> str:
    return variable.path.removeprefix(f"{model.name}/").replace("/", ".")


def variables(model: Any) -> dict[str, Any]:
    return {named(model, v): np.array(ops.convert_to_numpy(v)) for v in model.trainable_variables}


def states(model: Any) -> dict[str, Any]:
    found = {}
    for variable in model.trainable_variables:
        stem = variable.path.replace("/", "_")
        for state in model.optimizer.variables:
            name = state.path.partition("/")[2]
            if name.startswith(f"{stem}_"):
                slot = name.removeprefix(f"{stem}_")
                found[f"{named(model, variable)}.{slot}"] = np.array(ops.convert_to_numpy(state))
    return found


def loss_and_gradients(model: Any, x: Any, y: Any) -> tuple[float, list[Any]]:
    """By what the back-end itself offers, without a compiler."""
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if BACKEND == "jax":
        import jax

        def loss_of(values: Any) -> Any:
            out, _ = model.stateless_call(values, [v.value for v in model.non_trainable_variables], x, training=True)
            return loss_fn(y, out)

        loss, grads = jax.value_and_grad(loss_of)([v.value for v in model.trainable_variables])
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
    else:
        values = [v.value for v in model.trainable_variables]
        loss = loss_fn(torch.as_tensor(y), model(torch.as_tensor(x), training=True))
        grads = torch.autograd.grad(loss, values)
    return float(ops.convert_to_numpy(loss)), [np.array(ops.convert_to_numpy(g), np.float64) for g in grads]


def outputs(model: Any, x: Any) -> dict[str, Any]:
    """What each layer returns, layer by layer."""
    found = {}
    hidden = ops.convert_to_tensor(x)
    for layer in model.layers:
        if not isinstance(layer, layers.InputLayer):
            hidden = layer(hidden, training=True)
            found[layer.name] = np.array(ops.convert_to_numpy(hidden))
    return {**found, "model": found[model.layers[-1].name]}


# -------------------------------------------------------------------------------------------------------------- models

(X, Y), (HELD_X, HELD_Y) = (
    [part.numpy() for part in next(clusters(batch=size, seed=seed))] for size, seed in ((BATCH * STEPS, 0), (64, 9))
)


def batch_of(index: int) -> tuple[Any, Any]:
    rows = slice(BATCH * index, BATCH * (index + 1))
    return X[rows], Y[rows]


def functional() -> Any:
    inputs = keras.Input((12,))
    hidden = layers.Dense(32, activation="relu", name="first")(inputs)
    hidden = layers.LayerNormalization(name="norm")(hidden)
    return keras.Model(inputs, layers.Dense(4, name="out")(hidden))


def random_and_stateful() -> Any:
    return keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(32, name="first"),
            layers.BatchNormalization(name="batch_norm"),
            layers.ReLU(name="relu"),
            layers.Dropout(0.1, name="drop"),
            layers.Dense(4, name="out"),
        ]
    )


class OwnStep(keras.Model):
    """A train step as the guides of Keras write it, for this back-end."""

    if BACKEND == "tensorflow":

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predicted)
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return self._answer(y, predicted, loss)

    elif BACKEND == "torch":

        def train_step(self, data: Any) -> Any:
            x, y = data
            self.zero_grad()
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
            loss.backward()
            trained = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in trained], trained)
            return self._answer(y, predicted, loss)

    else:

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            trainable, others, of_optimizer, of_metrics = state
            x, y = data

            def loss_of(trainable: Any, others: Any) -> Any:
                predicted, others = self.stateless_call(trainable, others, x, training=True)
                return self.compute_loss(x, y, predicted), (predicted, others)

            (loss, (predicted, others)), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable, others)
            trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, trainable)
            made, logs = [], {}
            for metric in self.metrics:
                mine = of_metrics[len(made) : len(made) + len(metric.variables)]
                given = (loss,) if metric.name == "loss" else (y, predicted)
                mine = metric.stateless_update_state(mine, *given)
                logs[metric.name] = metric.stateless_result(mine)
                made += mine
            return logs, (trainable, others, of_optimizer, made)

    def _answer(self, y: Any, predicted: Any, loss: Any) -> Any:
        for metric in self.metrics:
            metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def own_step() -> Any:
    made = functional()
    return OwnStep(made.inputs, made.outputs)


def compiled(make: Callable[[], Any], optimizer: Any, **given: Any) -> Any:
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **given)
    return model


# ------------------------------------------------------------------------------------------------------------ programs


@dataclasses.dataclass(frozen=True)
class Program:
    """`train` is given a callback, or None, and returns the model and its losses."""

    train: Callable[[Any], tuple[Any, list[float]]]
    is_deterministic: bool = True
    clipnorm: float | None = None
    is_by_hand: bool = False
    """Without a callback: the loop tells sonde by itself."""


def fitted(make: Callable[[], Any], optimizer: Callable[[], Any], **given: Any) -> Callable[[Any], Any]:
    def train(callback: Any) -> Any:
        model = compiled(make, optimizer())
        history = model.fit(
            X,
            Y,
            **{
                "batch_size": BATCH,
                "epochs": 1,
                "verbose": 0,
                "shuffle": False,
                "callbacks": [callback] if callback is not None else [],
                **given,
            },
        )
        return model, [value for values in history.history.values() for value in values]

    return train


def fitted_twice(callback: Any) -> Any:
    model = compiled(functional, keras.optimizers.Adam(3e-3))
    losses = []
    for rows in (slice(0, BATCH * 15), slice(0, BATCH * STEPS)):
        given = {"batch_size": BATCH, "verbose": 0, "shuffle": False}
        history = model.fit(X[rows], Y[rows], callbacks=[callback] if callback is not None else [], **given)
        losses += history.history["loss"]
    return model, losses


def on_batches(callback: Any) -> Any:
    """`train_on_batch`, which has no callbacks: losses and steps are given to sonde by hand."""
    model = compiled(functional, keras.optimizers.Adam(3e-3))
    losses = []
    for step in range(STEPS):
        if isinstance(callback, Witness):
            callback.step = step
        loss = float(model.train_on_batch(*batch_of(step), return_dict=True)["loss"])
        model.reset_metrics()
        if isinstance(callback, Witness):
            callback.scalars["loss", step] = Expected(loss, EXACT)
        elif callback is not None:
            sonde.log({"loss": loss})
            sonde.step()
        losses.append(loss)
    return model, losses


PROGRAMS = {
    "fit": Program(fitted(functional, lambda: keras.optimizers.Adam(3e-3))),
    "fit, clipping by norm, validation": Program(
        fitted(
            functional,
            lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
            validation_data=(HELD_X, HELD_Y),
            epochs=2,
        ),
        clipnorm=0.5,
    ),
    "fit, dropout and batch norm, a schedule": Program(
        fitted(
            random_and_stateful,
            lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(5e-3, STEPS)),
        ),
        is_deterministic=False,
    ),
    "fit twice": Program(fitted_twice),
    "own train_step": Program(fitted(own_step, lambda: keras.optimizers.Adam(3e-3))),
    "train_on_batch": Program(on_batches, is_by_hand=True),
}


def imprint(model: Any, losses: list[float]) -> dict[str, Any]:
    found = {f"variable {v.path}": ops.convert_to_numpy(v).tobytes() for v in model.variables}
    found |= {f"optimizer {v.path}": ops.convert_to_numpy(v).tobytes() for v in model.optimizer.variables}
    return found | {f"loss {number}": float(loss).hex() for number, loss in enumerate(losses)}


def trained(program: Program, callback: Any) -> tuple[dict[str, Any], int]:
    """What came out of it, and the number of parameters."""
    keras.utils.set_random_seed(0)
    keras.utils.clear_session(free_memory=False)
    model, losses = program.train(callback)
    return imprint(model, losses), model.count_params()


def examine(name: str, program: Program, folder: Path) -> Answers:
    began = time.perf_counter()
    answers = Answers(f"Keras on {BACKEND}, {name}", "trainer")
    witness = Witness(is_deterministic=program.is_deterministic, clipnorm=program.clipnorm)
    with python_warnings() as usual:
        plain, answers.num_parameters = trained(program, None)
        seen, _ = trained(program, witness)
    assert plain == seen, [key for key in plain if plain[key] != seen[key]]
    with python_warnings() as now, sonde_words() as words:
        if program.is_by_hand:
            with sonde.init(dir=folder):
                watched, _ = trained(program, "sonde")
        else:
            watched, _ = trained(program, SondeCallback(dir=folder))
    run = sonde.open("latest", dir=folder)
    answers.not_identical = [key for key in plain if plain[key] != watched.get(key)]
    answers.num_identical, answers.identity_of = len(plain), "variables, optimizer state and losses"
    kinds = () if program.is_by_hand else KINDS if program.is_deterministic else ("param", "update", "optim")
    answers.values = compare(run, witness, kinds=kinds)
    answers.findings = faults_of(run)
    answers.warnings = [*words, *run.warnings, *sorted(now - usual)]
    answers.values.different += [str(problem) for problem in run.verify()]
    if (run.status, run.last_step) != ("finished", witness.step):
        answers.values.different.append(f"{run.status} after step {run.last_step}, should be {witness.step}")
    answers.num_steps = witness.step + 1
    answers.seconds = time.perf_counter() - began
    return answers


if __name__ == "__main__":
    target = Path(sys.argv[1])
    chosen = sys.argv[2:] or list(PROGRAMS)
    found = {}
    for number, name in enumerate(chosen):
        with contextlib.redirect_stdout(sys.stderr):
            answers = examine(name, PROGRAMS[name], target / str(number))
        found[name] = answers.as_json() | {"summary": str(answers.values)}
    (target / "answers.json").write_text(json.dumps(found))
    os._exit(0)  # TensorFlow's own threads take their time
