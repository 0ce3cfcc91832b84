"""Run by test_keras.py, once for each back-end: trains small models in all the ways, and prints what it found."""

from __future__ import annotations

import gc
import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import sonde
from sonde.adapters.keras import SondeCallback
from sonde.adapters.keras import sketches as reduce_keras
from sonde.budget.compiled_meter import CompiledMeter
from sonde.reduce.numpy import sketch as specified
from sonde.schema.sketch import HIST_N, INF, MAX, MIN, NAN, SUM, SUMABS, SUMSQ, ZERO, N

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).standard_normal((20, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Block(layers.Layer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.dense = layers.Dense(4, activation="tanh")

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return x + self.dense(x)


class Net(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Block(), Block()]
        self.scale = self.add_weight(shape=(1,), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return ops.sum(x, axis=1, keepdims=True) * self.scale


def functional(dropout: float = 0.1) -> Any:
    inputs = keras.Input((4,))
    hidden = layers.Dropout(dropout)(layers.Dense(8, activation="tanh")(inputs))
    return keras.Model(inputs, layers.Dense(1, name="out")(hidden))


def sequential() -> Any:
    return keras.Sequential([layers.Dense(8, activation="relu"), layers.BatchNormalization(scale=False, center=False),
                             layers.Dense(1)])  # fmt: skip


def recurrent() -> Any:
    inputs = keras.Input((4,))
    words = layers.Lambda(lambda x: ops.cast(ops.abs(x) * 3, "int32"))(inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.GRU(3)(layers.Embedding(40, 3)(words))))


def compiled(make: Any, optimizer: Any = None, **given: Any) -> Any:
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **given)
    return model


def small() -> Any:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1, name="out")(inputs))


def watcher(folder: Path, **given: Any) -> SondeCallback:
    """One that is compiled sooner."""
    return SondeCallback(dir=folder, verbose=False, **{"activations": False, "optim": False, **given})


def opened(callback: SondeCallback) -> Any:
    return sonde.open(callback.session.path)


class Losses(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))


def fit(model: Any, *callbacks: Any, x: Any = X, **given: Any) -> list[float]:
    losses = Losses()
    options = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False, **given}
    model.fit(x, Y if isinstance(x, np.ndarray) else None, callbacks=[losses, *callbacks], **options)
    return losses.seen


def left(model: Any) -> list[str]:
    """Names on any of its parts that stand there only while it is recorded."""
    owners = [model, *model._flatten_layers(include_self=False), model.optimizer, model._loss_tracker]
    found = [name for owner in owners for name in ("call", "train_step", "apply", "stateless_apply", "update_state")
             if name in vars(owner)]  # fmt: skip
    return found + (["train_function"] if "KerasRecorder" in repr(model.train_function) else [])


def sites(run: Any) -> dict[str, list[str]]:
    table = run.sites("*")
    pairs = list(zip(table["kind"].to_pylist(), table["site"].to_pylist(), strict=True))
    return {kind: sorted(site for k, site in pairs if k == kind) for kind, _ in pairs}


def steps(run: Any, series: str) -> list[int]:
    return list(run.stats(series)["step"].to_pylist())


def one(folder: Path, kind: str, make: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"validation_data": (X, Y)} if kind == "functional" else {}
    plain = fit(compiled(make), **given)
    model = compiled(make)
    callback = watcher(folder, activations=True, optim=True)
    recorded = fit(model, callback, **given)
    run = opened(callback)
    grads = sites(run)["grad"]
    return {
        "plain": plain,
        "recorded": recorded,
        "sites": sites(run),
        "variables": len(model.trainable_variables),
        "steps": [len(steps(run, f"grad/{site}/norm")) for site in grads],
        "still": [site for site in grads if 0.0 in run.stats(f"update/{site}/norm")["value"].to_pylist()],
        "act steps": steps(run, "act/model/rms"),
        "val": run.scalars("val_loss")["step"].to_pylist() if kind == "functional" else [],
        "rate": run.scalars("optim/lr")["value"].to_pylist(),
        "status": run.status,
        "left": left(model),
    }


def gradients(model: Any, x: Any, y: Any) -> tuple[float, list[np.ndarray]]:
    """By what the back-end itself offers."""
    if BACKEND == "jax":
        import jax

        def loss_of(values: Any) -> Any:
            out, _ = model.stateless_call(values, [v.value for v in model.non_trainable_variables], x, training=True)
            return ((out - y) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)([v.value for v in model.trainable_variables])
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        grads = tape.gradient(loss, [v.value for v in model.trainable_variables])
    else:
        import torch

        model.zero_grad()
        loss = ((model(torch.as_tensor(x), training=True) - torch.as_tensor(y)) ** 2).mean()
        loss.backward()
        grads = [v.value.grad for v in model.trainable_variables]
    return float(ops.convert_to_numpy(loss)), [ops.convert_to_numpy(g).astype(np.float64) for g in grads]


def by_hand(folder: Path) -> dict[str, Any]:
    def make() -> Any:
        return functional(0.0)

    model = compiled(make, keras.optimizers.SGD(0.1))
    names = ["dense.kernel", "dense.bias", "out.kernel", "out.bias"]
    wanted: dict[str, list[float]] = {name: [] for name in names}
    losses, acts = [], []
    for _ in range(2):
        for at in range(0, 20, 8):
            x, y = X[at : at + 8], Y[at : at + 8]
            weights = [ops.convert_to_numpy(v) for v in model.trainable_variables]
            acts.append(float(np.sqrt((np.tanh(x @ weights[0] + weights[1]).astype(np.float64) ** 2).mean())))
            loss, grads = gradients(model, x, y)
            losses.append(loss)
            for name, grad in zip(names, grads, strict=True):
                wanted[name].append(float(np.linalg.norm(grad)))
            for variable, weight, grad in zip(model.trainable_variables, weights, grads, strict=True):
                variable.assign(weight - np.float32(0.1) * grad.astype(np.float32))
    model = compiled(make, keras.optimizers.SGD(0.1))
    callback = watcher(folder, activations=True)
    fit(model, callback)
    run = opened(callback)
    hist = run.stats("grad/dense.kernel/abs_q50")["step"].to_pylist()
    return {
        "wanted": wanted,
        "histograms": hist,
        "seen": {name: run.stats(f"grad/{name}/norm")["value"].to_pylist() for name in names},
        "wanted loss": losses,
        "loss": run.scalars("loss")["value"].to_pylist(),
        "wanted act": acts,
        "act": run.stats("act/dense/rms")["value"].to_pylist(),
    }


class Fails(keras.callbacks.Callback):
    def __init__(self, fail: Any) -> None:
        super().__init__()
        self.fail = fail

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.fail()


def broken() -> None:
    raise RuntimeError("broken on purpose")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


class Data(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            broken()
        return X[:8], Y[:8]


class FailsInside(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.num = 0

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, *args: Any) -> Any:
        broken()


def ends(folder: Path) -> dict[str, Any]:
    found = {}
    for how, make, callbacks, x in (
        ("raises in a step", FailsInside, [], X),
        ("raises in a callback", small, [Fails(broken)], X),
        ("raises in the data", small, [], Data()),
        ("interrupted", small, [Fails(interrupt)], X),
    ):
        model = compiled(make)
        given = {} if isinstance(x, np.ndarray) else {"batch_size": None}
        callback = watcher(folder, activations=how == "interrupted")
        try:
            fit(model, callback, *callbacks, x=x, **given)
        except (Exception, KeyboardInterrupt) as error:
            message = str(error) or how
        gc.collect()
        run = opened(callback)
        found[how] = {"status": run.status, "left": left(model), "reason": run.reason, "error": message}
    return found


def again(folder: Path) -> dict[str, Any]:
    callback = watcher(folder, project="again")
    model = compiled(small)
    fit(model, callback, epochs=1)
    fit(model, callback, epochs=1)
    run = opened(callback)
    return {
        "runs": len(list((folder / "again").iterdir())),
        "steps": steps(run, "grad/out.kernel/norm"),
        "status": run.status,
    }


def returns(folder: Path) -> dict[str, Any]:
    """Back to a saved model: by the callback of before, by a new one that resumes, and by Keras's own backup."""
    return {how: returned(folder, how) for how in ("same callback", "another process", "backup first", "backup last")}


def returned(folder: Path, how: str) -> dict[str, Any]:
    place = folder / how.replace(" ", "-")
    place.mkdir()

    def backup() -> list[Any]:
        if not how.startswith("backup"):
            return []
        return [keras.callbacks.BackupAndRestore(str(place / "backup"), delete_checkpoint=False)]

    callback, model = watcher(place, project="returns"), compiled(small)
    fit(model, *backup(), callback, epochs=2)  # six steps
    model.save(place / "at.keras")
    fit(model, callback, epochs=1)  # three more, which are abandoned
    before = sonde.open(callback.session.path).scalars("loss")["value"].to_pylist()
    if how != "same callback":
        callback = watcher(place, project="returns", resume=str(callback.session.path))
    model = compiled(small) if how.startswith("backup") else keras.models.load_model(place / "at.keras")
    callbacks = [callback, *backup()] if how == "backup last" else [*backup(), callback]
    made = fit(model, *callbacks, x=2 * X, epochs=3, initial_epoch=2)
    run = opened(callback)
    return {
        "first step": run.attempts()["first_step"].to_pylist()[-1],
        "steps": steps(run, "grad/out.kernel/norm"),
        "loss": run.scalars("loss")["value"].to_pylist(),
        "before": before,
        "earlier": run.attempt(-2).scalars("loss")["value"].to_pylist(),
        "made": made,
    }


def schedule(folder: Path) -> dict[str, Any]:
    plain = fit(compiled(small))
    callback = watcher(folder, when=2)
    seen = fit(compiled(small), callback)
    return {"steps": steps(opened(callback), "grad/out.kernel/norm"), "same": seen == plain}


def execution(folder: Path) -> dict[str, Any]:
    if BACKEND == "torch":
        return {}
    given = {"steps_per_execution": 2}
    plain = fit(compiled(small, **given), batch_size=4, epochs=1)
    callback = watcher(folder)
    seen = fit(compiled(small, **given), callback, batch_size=4, epochs=1)
    return {"steps": steps(opened(callback), "grad/out.kernel/norm"), "same": seen == plain}


def scaled(folder: Path) -> dict[str, Any]:
    """The same gradients with a loss that is scaled up against underflow."""
    found = []
    for optimizer in (
        keras.optimizers.SGD(0.01),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1024.0),
        keras.optimizers.SGD(0.01, loss_scale_factor=8.0),
    ):
        callback = watcher(folder)
        fit(compiled(small, optimizer), callback, epochs=1)
        found.append(opened(callback).stats("grad/out.kernel/norm")["value"].to_pylist())
    return {"wanted": found[0] * 2, "seen": found[1] + found[2]}


def clipped(folder: Path) -> dict[str, Any]:
    """Norms as the optimizer uses them, and before it clips, for each of Keras's ways to clip."""
    found = {}
    ways = {"not": {}, "all": {"global_clipnorm": 0.1}, "values": {"clipvalue": 0.01}}
    for how, given in ways.items():
        callback = watcher(folder)
        fit(compiled(small, keras.optimizers.SGD(0.0, **given)), callback, epochs=1, batch_size=20)
        run = opened(callback)
        norms = {stat: run.stats(f"grad/*/{stat}")["value"].to_pylist() for stat in ("norm", "norm_preclip", "max_abs")}
        found[how] = norms | {"update": max(run.stats("update/*/norm")["value"].to_pylist())}
    return found


def faults(folder: Path) -> dict[str, Any]:
    """What the rules say of nets with a planted fault, and of one without."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((512, 8)).astype("float32")
    y = np.sign(x[:, :1] * x[:, 1:2])

    def net(depth: int, activation: str, bias: float = 0.0) -> Any:
        """Of the same weights on each back-end."""
        hidden = [layers.Dense(16, activation=activation) for _ in range(depth)]
        model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(1)])
        weights = [draw.standard_normal(w.shape) * w.shape[0] ** -0.5 for w in model.get_weights()]
        weights = [w if w.ndim == 2 else np.full(w.shape, bias) for w in weights]
        model.set_weights([*weights[:-2], 0.1 * weights[-2], np.zeros(1)])
        return model

    found = {}
    for how, make in {
        "vanishing": lambda: net(12, "sigmoid"),
        "dead": lambda: net(3, "relu", -30.0),
        "healthy": lambda: net(2, "relu"),
    }.items():
        callback = watcher(folder, activations=how != "vanishing")
        model = compiled(make)
        model.fit(x, y, batch_size=32, epochs=4, verbose=0, shuffle=False, callbacks=[callback])
        run = opened(callback)
        structure = run.structure() or {}
        found[how] = {
            "rules": [finding.rule for finding in run.findings() if finding.severity > "info"],
            "order": [m["name"] for m in structure["modules"] if m["order"] > 0],
            "kinds": {m["name"]: m["kind"] for m in structure["modules"]},
            "fan in": {p["name"]: p["fan_in"] for p in structure["parameters"] if p["name"].endswith("kernel")},
            "parameters": structure["total_parameters"],
            "optimizer": structure["optimizers"][0],
        }
    return found


def governed(folder: Path) -> dict[str, Any]:
    """A budget that cannot be kept: recording gets rare, and says so. Where steps are compared, by a clock of ours."""
    begin, clock = CompiledMeter.begin, itertools.count()

    def ticking(meter: CompiledMeter, now: float) -> None:
        for _ in range(3 if meter._ended is not None and meter._ended[1] else 1):
            now = 1e-3 * next(clock)
        begin(meter, now)

    CompiledMeter.begin = ticking  # type: ignore[method-assign]
    plain = fit(compiled(small), epochs=30)
    given = {"when": 2, "budget_seconds": 0, "hist_every": 1}
    found: dict[str, Any] = {}
    for name, budget in {"small": 1e-6, "none": None}.items():
        callback = watcher(folder, budget=budget, **given)
        seen = fit(compiled(small), callback, epochs=30)
        run = opened(callback)
        found[name] = {
            "same": seen == plain,
            "steps": steps(run, "grad/out.kernel/norm"),
            "events": [m for t, m in zip(*(run.events()[c].to_pylist() for c in ("type", "message")), strict=True)
                       if t == "cadence"],
            "overhead": run.manifest.facts["overhead"],
        }  # fmt: skip
    callback = watcher(folder)
    fit(compiled(small), callback)
    found["short"] = opened(callback).manifest.facts["overhead"]
    CompiledMeter.begin = begin  # type: ignore[method-assign]
    return found


def recorded(folder: Path) -> dict[str, Any]:
    def options(how: str) -> dict[str, Any]:
        return {"dir": folder / how, "verbose": False}

    def facts(how: str, model: Any) -> dict[str, Any]:
        run = sonde.open("latest", dir=folder / how)
        known = sites(run)
        odd = [site for names in known.values() for site in names if "_torch_params" in site]
        return {"status": run.status, "grads": len(known.get("grad", [])), "odd": odd, "left": left(model)}

    found = {}
    model = sonde.record(compiled(small), **options("a model"))
    fit(model)
    found["a model"] = facts("a model", model)

    @sonde.record(**options("a function"))
    def train() -> Any:
        model = compiled(small)
        fit(model)
        return model

    found["a function"] = facts("a function", train())
    assert "fit" not in vars(keras.Model)

    @sonde.record(**options("a class"))
    class Small(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = compiled(Small)
    fit(model)
    found["a class"] = facts("a class", model)
    return found


class Two(keras.Model):
    """Two parts, with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = layers.Dense(8, activation="tanh"), layers.Dense(1)
        self.second = keras.optimizers.SGD(0.05, momentum=0.9)

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        if BACKEND == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = ops.mean((self(x) - y) ** 2)
            grads = tape.gradient(loss, self.trainable_variables)
        else:
            import torch

            self.zero_grad()
            loss = ops.mean((self(x) - y) ** 2)
            loss.backward()
            grads = [v.value.grad for v in self.trainable_variables]
            torch.set_grad_enabled(False)
        self.optimizer.apply(grads[:2], self.trainable_variables[:2])
        self.second.apply(grads[2:], self.trainable_variables[2:])
        if BACKEND == "torch":
            torch.set_grad_enabled(True)
        return {"loss": loss}


def settings(folder: Path) -> dict[str, Any]:
    """The numbers of optimizers: scheduled, constant, of a second one, and what is not decayed."""
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, beta_2=0.95)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    callback = watcher(folder)
    fit(compiled(small, optimizer), callback)
    run = opened(callback)

    def numbers(run: Any, name: str) -> list[Any]:
        return [run.scalars(name)[column].to_pylist() for column in ("step", "value")]

    names = ("optim/lr", "optim/weight_decay", "optim/beta2")
    structure = run.structure()
    found = {name: numbers(run, name) for name in names} | {
        "groups": [(group["weight_decay"], group["num_params"]) for group in structure["optimizers"][0]["groups"]],
        "of": {p["name"]: (p["optimizer"], p["group"]) for p in structure["parameters"]},
    }
    if BACKEND == "jax":
        return found  # a state of two optimizers is the user's own affair there
    callback = watcher(folder)
    model = Two()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model, callback)
    run = opened(callback)
    two = {name: numbers(run, name)[1] for name in ("optim/lr", "optim/beta1", "optim/1/lr", "optim/1/momentum")}
    return found | {"two": two, "two of": {p["name"]: p["optimizer"] for p in run.structure()["parameters"]}}


class CallsPython(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.calls: list[int] = []

    def call(self, x: Any) -> Any:
        import tensorflow as tf

        tf.py_function(lambda: self.calls.append(1), [], [])
        return self.dense(x)


def python(folder: Path) -> dict[str, Any]:
    """Code that a step calls is called once for each step."""
    if BACKEND != "tensorflow":
        return {}
    callback = watcher(folder)
    model = compiled(CallsPython)
    fit(model, callback)
    run = opened(callback)
    return {"calls": len(model.calls), "logs": run.scalars("mae").num_rows, "grads": run.stats("grad/*/norm").num_rows}


def sketches() -> list[str]:
    """Names of those that are not what they should be."""
    draw = np.random.default_rng(0)
    normal = draw.standard_normal(50_003).astype(np.float32)
    awkward = {
        "positive": np.abs(normal),
        "huge": np.abs(normal) * np.float32(1e30),
        "tiny": np.abs(normal) * np.float32(1e-30),
        "broken": np.array([1, np.nan, -np.inf, 0, 3, np.inf], np.float32),
        "nothing finite": np.array([np.nan, np.inf], np.float32),
        "zeros": np.zeros((3, 5), np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "one": np.array(-2.5, np.float32),
        "integers": np.arange(-5, 7, dtype=np.int32),
    }

    def run(*values: Any) -> Any:
        return reduce_keras.sketch_all(values, 512)

    values = [ops.convert_to_tensor(x) for x in awkward.values()]
    ways = [run]
    if BACKEND == "jax":
        import jax

        ways.append(jax.jit(run))
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        unknown = [tf.TensorSpec([None] * x.ndim, x.dtype) for x in awkward.values()]
        ways += [tf.function(run), tf.function(run, jit_compile=True), tf.function(run, input_signature=unknown)]
    wrong = []
    for way in ways:
        rows, hists = reduce_keras.to_rows(way(*values))
        for name, row, hist in zip(awkward, rows, hists, strict=True):
            wanted, counts = specified(awkward[name]).rows, specified(awkward[name]).hist
            is_whole, num = awkward[name].size <= 512, wanted[N]
            if not (np.array_equal(hist, counts) if is_whole else np.abs(hist - counts).max() < 0.06 * num):
                wrong.append(f"histogram of {name}: {hist} not {counts}")
            if row[HIST_N] != min(num, 512) or not np.isclose(hist.sum(), counts.sum()):
                wrong.append(f"sum of the histogram of {name}: {hist.sum()} of {row[HIST_N]}")
            exact, moments = [N, NAN, INF, ZERO, MIN, MAX], [SUM, SUMSQ, SUMABS]
            if not np.array_equal(row[exact], wanted[exact]) or not np.allclose(row[moments], wanted[moments], 1e-6, 0):
                wrong.append(f"{name}: {row} not {wanted}")
    return wrong


def main(folder: Path) -> None:
    kinds = {"functional": functional, "sequential": sequential, "subclassed": Net, "recurrent": recurrent}
    found: dict[str, Any] = {kind: one(folder, kind, make) for kind, make in kinds.items()}
    found["sketches"] = sketches()
    for name, function in {
        "by hand": by_hand,
        "ends": ends,
        "again": again,
        "schedule": schedule,
        "execution": execution,
        "scaled": scaled,
        "record": recorded,
        "returns": returns,
        "clipped": clipped,
        "faults": faults,
        "governed": governed,
        "settings": settings,
        "python": python,
    }.items():
        found[name] = function(folder)
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        fail = {"interrupt": interrupt, "raise": broken}[sys.argv[2]]
        fit(compiled(functional), SondeCallback(dir=sys.argv[1], project="ends", verbose=False), Fails(fail))
    else:
        main(Path(sys.argv[1]))
