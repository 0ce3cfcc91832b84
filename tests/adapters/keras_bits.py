"""Run by test_keras.py, once for each back-end: trains models with sonde and without, and prints where they differ."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import sonde
from sonde.adapters.keras import SondeCallback

BACKEND = keras.backend.backend()
DRAW = np.random.default_rng(0)
ROWS = DRAW.standard_normal((34, 12)).astype("float32")
IMAGES = DRAW.standard_normal((34, 8, 8, 3)).astype("float32")
WORDS = DRAW.integers(0, 50, (34, 6)).astype("int32")
Y = (ROWS[:, :1] * ROWS[:, 1:2] + 0.3 * ROWS.sum(1, keepdims=True)).astype("float32")
EPOCHS = 6
"""Of nine batches, the last of which is smaller."""


def dense() -> Any:
    inputs = keras.Input((12,))
    hidden = layers.Dense(16, activation="tanh")(layers.Dense(16, activation="relu")(inputs))
    return keras.Model(inputs, layers.Dense(1)(hidden)), ROWS


def dropout() -> Any:
    inputs = keras.Input((12,))
    hidden = layers.Dropout(0.3, seed=1)(layers.Dense(16, activation="gelu")(inputs))
    return keras.Model(inputs, layers.Dense(1)(layers.GaussianNoise(0.1)(hidden))), ROWS


def conv() -> Any:
    inputs = keras.Input((8, 8, 3))
    hidden = layers.MaxPooling2D()(layers.Conv2D(4, 3, activation="relu")(inputs))
    hidden = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, padding="same", activation="relu")(hidden))
    return keras.Model(inputs, layers.Dense(1)(hidden)), IMAGES


def norm() -> Any:
    inputs = keras.Input((8, 8, 3))
    hidden = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3)(inputs)))
    hidden = layers.LayerNormalization()(layers.Flatten()(hidden))
    return keras.Model(inputs, layers.Dense(1)(hidden)), IMAGES


def lstm() -> Any:
    inputs = keras.Input((6,), dtype="int32")
    return keras.Model(inputs, layers.Dense(1)(layers.LSTM(5)(layers.Embedding(50, 4)(inputs)))), WORDS


def embedding() -> Any:
    inputs = keras.Input((6,), dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(50, 4)(inputs))
    return keras.Model(inputs, layers.Dense(1)(hidden)), WORDS


def mixed() -> Any:
    keras.mixed_precision.set_global_policy("mixed_bfloat16" if BACKEND == "torch" else "mixed_float16")
    try:
        return dense()
    finally:
        keras.mixed_precision.set_global_policy("float32")


class Counting(keras.Model):
    """A custom training step, with a state that Keras does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        if BACKEND == "tensorflow":
            import tensorflow as tf

            self.untracked = {"count": [tf.Variable(0.0, trainable=False)]}["count"]

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, *args: Any) -> Any:
        if BACKEND == "tensorflow":
            self.untracked[0].assign_add(1.0)
        return super().train_step(*args)


def counting() -> Any:
    return Counting(), ROWS


class Losses(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))


def clipped() -> Any:
    return keras.optimizers.AdamW(0.01, global_clipnorm=0.5)


def train(make: Any, optimizer: Any, callback: Any = None, **given: Any) -> tuple[list[float], dict[str, bytes]]:
    keras.utils.set_random_seed(3)
    model, x = make()
    model.compile(optimizer(), "mse", metrics=["mae"], **given)
    losses = Losses()
    model.fit(x, Y, batch_size=4, epochs=EPOCHS, verbose=0, callbacks=[losses, *([callback] if callback else [])])
    variables = [*model.variables, *model.optimizer.variables, *getattr(model, "untracked", [])]
    found = {str(i): np.asarray(ops.convert_to_numpy(v)).tobytes() for i, v in enumerate(variables)}
    return losses.seen, found | {"draws": str((random.random(), np.random.rand())).encode()}  # noqa: NPY002


def compared(folder: Path, make: Any, optimizer: Any, **given: Any) -> dict[str, Any]:
    losses, variables = train(make, optimizer, **given)
    callback = SondeCallback(dir=folder, verbose=False)
    seen, same = train(make, optimizer, callback, **given)
    run = sonde.open(callback.session.path)
    return {
        "steps": len(losses),
        "losses": [step for step, (a, b) in enumerate(zip(losses, seen, strict=True)) if a != b],
        "variables": [name for name in variables if variables[name] != same[name]],
        "recorded": run.stats("grad/*/norm").num_rows // max(len(set(run.sites("grad/*")["site"].to_pylist())), 1),
        "acts": run.stats("act/*/rms").num_rows > 0,
    }


class Variables(keras.callbacks.Callback):
    """Every variable before each step; an epoch is one batch, since JAX only then gives its state back."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[list[bytes]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        self.before.append([np.asarray(ops.convert_to_numpy(v)).tobytes() for v in variables])


def kept(folder: Path, how: str) -> dict[str, Any]:
    """The snapshots of a run against the same run without sonde, whose variables are read before each step."""
    seen = []
    for is_watched in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((12,))
        hidden = layers.BatchNormalization()(layers.Dense(16, activation="relu", name="first")(inputs))
        model = keras.Model(inputs, layers.Dense(1, name="last")(layers.Dropout(0.3, seed=1)(hidden)))
        # Half of a gradient is exact in binary: the update shows it.
        model.compile(keras.optimizers.SGD(0.5) if how == "sgd" else keras.optimizers.Adam(0.01), "mse")
        variables, callbacks = Variables(), []
        if is_watched and how == "sgd":
            plan = sonde.Snapshots(when=1, kinds="all", options={"compression": "none"})
            callbacks = [session := SondeCallback(dir=folder, verbose=False, snapshots=plan)]
        elif is_watched:
            session = sonde.watch(
                model, dir=folder, verbose=False, snapshots=sonde.Snapshots(when=2, kinds="param,optim")
            )
            ask = keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda at, _: sonde.snapshot("act") if at == 3 else None
            )
            callbacks = [ask]
        model.fit(ROWS, Y, batch_size=34, epochs=5, verbose=0, shuffle=False, callbacks=[*callbacks, variables])
        seen.append(variables.before)
    path = session.session.path if how == "sgd" else session.path
    sonde.finish()
    run = sonde.open(path)
    steps = run.tensors.snapshots()["step"].to_pylist()
    return {"run": run, "steps": steps, "same": seen[0] == seen[1], "plain": seen[0], "warnings": run.warnings}


def snapshots(folder: Path) -> dict[str, Any]:
    sgd, adam = kept(folder / "sgd", "sgd"), kept(folder / "adam", "adam")
    tensors = [sgd["run"].tensors.snapshot(step) for step in sgd["steps"]]
    found = [sorted(np.asarray(t[name]).tobytes() for name in t if name[:5] in ("param", "optim")) for t in tensors]
    updates = []
    for before, after in itertools.pairwise(tensors):
        for name in ("first.kernel", "last.bias", "batch_normalization.gamma"):
            was, now, grad = before[f"param/{name}"], after[f"param/{name}"], before[f"grad/{name}"]
            updates.append(float(np.abs((was - now) - grad / 2).max() / np.abs(grad).max()))
    t = tensors[2]
    act = np.maximum(t["batch/input.0"] @ t["param/first.kernel"] + t["param/first.bias"], 0)
    last = adam["run"].tensors.snapshot(4)
    return {
        "same": [sgd["same"], adam["same"]],
        "steps": [sgd["steps"], adam["steps"]],
        "warnings": [*sgd["warnings"], *adam["warnings"]],
        "variables": [a == sorted(b) for a, b in zip(found, sgd["plain"], strict=True)],
        "adam": sorted(np.asarray(last[name]).tobytes() for name in last) == sorted(adam["plain"][4]),
        "update": max(updates),
        "act": float(np.abs(act - t["act/first"]).max()),
        "batch": t["batch/input.0"].tobytes() == ROWS.tobytes(),
        "asked": sorted(adam["run"].tensors.snapshot(3)),
    }


def main(folder: Path) -> None:
    found: dict[str, Any] = {"snapshots": snapshots(folder)}
    for make in (counting, dense, dropout, conv, norm, lstm, embedding, mixed):
        found[make.__name__] = compared(folder, make, clipped)
    found["adam"] = compared(folder, dropout, lambda: keras.optimizers.Adam(0.01))
    found["eager"] = compared(folder, dropout, clipped, run_eagerly=True)
    if BACKEND != "torch":
        found["execution"] = compared(folder, norm, clipped, steps_per_execution=4)
    if BACKEND == "tensorflow":
        for make in (conv, norm):
            found[f"{make.__name__}, jit"] = compared(folder, make, clipped, jit_compile=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
