"""Programs in Keras, on whichever backend is chosen (TensorFlow by default)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from keras import layers

from sonde.adapters.keras import SondeCallback
from trainers.points import blobs, curves, images
from trainers.program import program

STUCK = ("underfitting", "loss_plateau", "constant_output")


def numpy(data: Any) -> Any:
    x, y = data.tensors
    return (x.movedim(1, -1) if x.ndim == 4 else x).numpy(), y.numpy()


def fit(
    folder: Path, model: Any, data: Any, *, optimizer: Any, loss: Any = None, epochs: int = 4, val: Any = None,
    shuffle: bool = True, batch: int = 32, **more: Any,
) -> None:  # fmt: skip
    x, y = data if isinstance(data, tuple) else numpy(data)
    model.compile(optimizer, loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = SondeCallback(project="trainers", dir=str(folder), verbose=False, budget=None)
    model.fit(
        x, y, batch_size=batch, epochs=epochs, shuffle=shuffle, verbose=0, callbacks=[callback],
        validation_data=None if val is None else numpy(val), **more,
    )  # fmt: skip


def dense(*widths: int, activation: str = "relu", last: str | None = None, dropout: float = 0.0) -> Any:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([layers.Input((widths[0],))])
    for width in widths[1:-1]:
        model.add(layers.Dense(width, activation))
        if dropout:
            model.add(layers.Dropout(dropout))
    model.add(layers.Dense(widths[-1], last))
    return model


@program("keras_lr_high", "lr_too_high", also_ok=("loss_oscillation", "dead_relu", "exploding_gradients", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    fit(folder, dense(16, 64, 64, 6), blobs(), optimizer=keras.optimizers.Adam(2e-3 if fixed else 1.0))


@program("keras_lr_low", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    fit(folder, dense(16, 64, 6), blobs(), optimizer=keras.optimizers.Adam(2e-3 if fixed else 1e-7))


@program("keras_warmup_never_ends", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, 200 if fixed else 200_000, warmup_target=3e-3, warmup_steps=20 if fixed else 100_000
    )
    fit(folder, dense(16, 64, 6), blobs(), optimizer=keras.optimizers.Adam(schedule))


@program("keras_sigmoid_and_logits", "wrong_loss_activation_pair", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    fit(folder, dense(16, 64, 6, last=None if fixed else "sigmoid"), blobs(), optimizer=keras.optimizers.Adam(2e-3))


@program("keras_frozen", "frozen_layers", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    model = dense(8, 64, 64, 64, 1)
    if not fixed:
        for layer in model.layers[:-1]:
            layer.trainable = False
    fit(folder, model, curves(), optimizer=keras.optimizers.Adam(2e-3), loss="mse", epochs=6)


@program(
    "keras_raw_inputs", "unnormalised_inputs", also_ok=("lr_too_high", "loss_spikes", "exploding_gradients", *STUCK)
)
def _(folder: Path, fixed: bool) -> None:
    x, y = numpy(blobs())
    fit(folder, dense(16, 64, 6), (x if fixed else 3000 + 900 * x, y), optimizer=keras.optimizers.Adam(2e-3))


@program("keras_overfitting", "overfitting")
def _(folder: Path, fixed: bool) -> None:
    data = blobs(1200 if fixed else 48, noise=2.0)
    fit(folder, dense(16, 128, 128, 6), data, optimizer=keras.optimizers.Adam(3e-3), epochs=4 if fixed else 90,
        val=blobs(256, seed=1, noise=2.0))  # fmt: skip


@program("keras_adam_epsilon", "adam_epsilon_dominates", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    optimizer = keras.optimizers.Adam(2e-3, epsilon=1e-7 if fixed else 10.0)
    fit(folder, dense(16, 64, 6), blobs(), optimizer=optimizer)


@program("keras_not_shuffled", "data_not_shuffled", also_ok=("loss_oscillation", "lr_too_high"))
def _(folder: Path, fixed: bool) -> None:
    x, y = numpy(blobs(960))
    order = y.argsort()
    fit(folder, dense(16, 64, 6), (x[order], y[order]), optimizer=keras.optimizers.Adam(2e-3), shuffle=fixed)


@program("keras_dead_relu", "dead_relu", also_ok=("init_scale", "vanishing_gradients", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    keras.utils.set_random_seed(7)
    bias = keras.initializers.Constant(0.0 if fixed else -12.0)
    model = keras.Sequential([layers.Input((16,)), layers.Dense(64, "relu", bias_initializer=bias), layers.Dense(6)])
    fit(folder, model, blobs(), optimizer=keras.optimizers.Adam(1e-3))


@program("h_keras_blobs")
def _(folder: Path, fixed: bool) -> None:
    fit(folder, dense(16, 64, 64, 6), blobs(), optimizer=keras.optimizers.Adam(2e-3), val=blobs(256, seed=1))


@program("h_keras_regression")
def _(folder: Path, fixed: bool) -> None:
    fit(
        folder,
        dense(8, 64, 64, 1),
        curves(),
        optimizer=keras.optimizers.AdamW(3e-3),
        loss="mse",
        val=curves(256, seed=1),
    )


@program("h_keras_images")
def _(folder: Path, fixed: bool) -> None:
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            layers.Input((12, 12, 1)), layers.Conv2D(12, 3, activation="relu"), layers.BatchNormalization(),
            layers.MaxPooling2D(), layers.Conv2D(24, 3, activation="relu"), layers.GlobalAveragePooling2D(),
            layers.Dense(4),
        ]
    )  # fmt: skip
    fit(folder, model, images(), optimizer=keras.optimizers.Adam(3e-3), epochs=6, val=images(200, seed=1))


@program("h_keras_class_weights", source="one in ten, weighted by nine")
def _(folder: Path, fixed: bool) -> None:
    x, y = numpy(blobs(6000, classes=2, width=8, noise=2.5))
    import numpy as np

    keep = (y == 0) | (np.random.default_rng(1).random(len(y)) < 0.1)
    fit(folder, dense(8, 32, 2), (x[keep], y[keep]), optimizer=keras.optimizers.Adam(2e-3),
        class_weight={0: 1.0, 1: 9.0}, epochs=2)  # fmt: skip


@program("h_keras_short")
def _(folder: Path, fixed: bool) -> None:
    fit(folder, dense(8, 64, 64, 1), curves(), optimizer=keras.optimizers.SGD(1e-2), loss="mse", epochs=1)
