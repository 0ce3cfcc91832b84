"""Run by test_keras.py, once for each back-end: trains models with sonde and without, and prints where they differ."""

from __future__ import annotations

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


def main(folder: Path) -> None:
    found = {}
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
