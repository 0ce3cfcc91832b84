"""Keras 3: one callback in `fit`, on any backend. Here it runs on torch unless KERAS_BACKEND says otherwise.

You should see: the layers under the names you gave them, and how far each update moved its weights. Takes seconds.
Needs: pip install 'sonde-ml[keras]'
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

import sonde
from sonde.adapters.keras import SondeCallback

keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(512, 10)).astype("float32")
model = keras.Sequential([keras.layers.Dense(32, activation="relu", name="hidden"), keras.layers.Dense(1, name="out")])
model.compile(keras.optimizers.AdamW(1e-2), "mse")
model.fit(x, x.sum(1), epochs=3, verbose=0, callbacks=[SondeCallback(project="examples", name="keras")])

print(sonde.open("latest").stats("update/*/ratio", steps="-1:"))
