"""JAX, Optax and Flax, the real ones: sketches inside `jit`, handed over outside."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import sonde

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

import sonde.adapters.jax as sonde_jax  # noqa: E402
from sonde.adapters.jax.sketches import sketch_arrays, to_rows  # noqa: E402
from sonde.errors import UsageError  # noqa: E402
from sonde.reduce.numpy import sketch  # noqa: E402
from sonde.schema.sketch import HIST_N, INF, MAX, MIN, NAN, SUM, SUMABS, SUMSQ, ZERO, N  # noqa: E402

pytestmark = pytest.mark.slow  # compilers take their time

EXACT = [N, NAN, INF, ZERO, MIN, MAX]
MOMENTS = [SUM, SUMSQ, SUMABS]


def awkward() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    normal = draw.standard_normal(100_003).astype(np.float32)
    return {
        "normal": normal,
        "positive": np.abs(normal),
        "huge": np.abs(normal) * np.float32(1e30),
        "tiny": np.abs(normal) * np.float32(1e-30),
        "broken": np.array([1, np.nan, -np.inf, 0, 3, np.inf], np.float32),
        "nothing finite": np.array([np.nan, np.inf], np.float32),
        "zeros": np.zeros((3, 5), np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "one": np.array(-2.5, np.float32),
        "integers": np.arange(-5, 7, dtype=np.int32),
        "complex": np.array([1 + 2j, -3j], np.complex64),
    }


@pytest.mark.parametrize("name", awkward())
@pytest.mark.parametrize("is_jitted", [True, False])
def test_agrees_with_the_specification(name, is_jitted):
    x = awkward()[name]

    def run(x: Any) -> Any:
        return sketch_arrays([("custom", "x", x)])

    rows, hist = to_rows((jax.jit(run) if is_jitted else run)(x))
    wanted = sketch(x)
    np.testing.assert_array_equal(rows[0, EXACT], wanted.rows[EXACT])
    np.testing.assert_allclose(rows[0, MOMENTS], wanted.rows[MOMENTS], rtol=1e-6, atol=1e-3 if name == "normal" else 0)
    if x.size <= 512:
        np.testing.assert_array_equal(hist[0], wanted.hist)
        assert rows[0, HIST_N] == wanted.rows[HIST_N]
    assert hist[0].sum() == pytest.approx(wanted.hist.sum(), rel=0.02)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_narrow_types_are_read_as_they_are(dtype):
    x = jnp.asarray(np.random.default_rng(1).standard_normal(999), dtype)
    rows, _ = to_rows(sketch_arrays([("param", "x", x)]))
    wanted = sketch(np.asarray(x.astype(jnp.float32)))
    np.testing.assert_allclose(rows[0, MOMENTS], wanted.rows[MOMENTS], rtol=1e-5)
    np.testing.assert_array_equal(rows[0, EXACT], wanted.rows[EXACT])


def make() -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    params = {
        "dense": {"kernel": jnp.asarray(draw.standard_normal((4, 8)), jnp.float32), "bias": jnp.zeros(8)},
        "out": {"kernel": jnp.asarray(draw.standard_normal((8, 1)), jnp.float32)},
    }
    x = jnp.asarray(draw.standard_normal((16, 4)), jnp.float32)

    def loss_fn(params: Any) -> Any:
        hidden = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"])
        return ((hidden @ params["out"]["kernel"] - x.sum(1, keepdims=True)) ** 2).mean()

    return params, loss_fn, x


def train(optimizer: Any, *, is_recorded: bool, donate: bool = False) -> tuple[list[float], list[Any], list[Any]]:
    params, loss_fn, _ = make()
    state = optimizer.init(params)

    def step(params: Any, state: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, grads, updates

    jitted = jax.jit(step, donate_argnums=(1,) if donate else ())
    losses, all_grads, all_updates = [], [], []
    for _ in range(5):
        params, state, loss, grads, updates = jitted(params, state)
        if is_recorded:
            sonde_jax.step(state, loss=loss)
        losses.append(float(loss))
        all_grads.append(grads)
        all_updates.append(updates)
    return losses, all_grads, all_updates


@pytest.mark.parametrize("donate", [False, True])
def test_an_optax_loop_is_recorded_with_gradients_and_updates(tmp_path, donate):
    with sonde.init(project="jax", dir=tmp_path, verbose=False) as session:
        losses, grads, updates = train(sonde_jax.recorded(optax.adamw(1e-2)), is_recorded=True, donate=donate)
        errors = session.recording.breaker.num_errors
    assert errors == 0
    run = sonde.open("latest", dir=tmp_path)
    np.testing.assert_allclose(run.scalars("loss")["value"].to_pylist(), losses)
    for kind, trees in (("grad", grads), ("update", updates)):
        table = run.stats(f"{kind}/dense.kernel/norm")
        assert table["step"].to_pylist() == list(range(5))
        wanted = [np.linalg.norm(np.asarray(tree["dense"]["kernel"]).astype(np.float64)) for tree in trees]
        np.testing.assert_allclose(table["value"].to_pylist(), wanted, rtol=1e-6)
    assert set(run.sites("param/*")["site"].to_pylist()) == {"dense.kernel", "dense.bias", "out.kernel"}
    assert run.stats("update/dense.kernel/ratio").num_rows == 5


def test_one_step_in_several_is_recorded_and_the_others_are_not(tmp_path):
    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        losses, grads, _ = train(sonde_jax.recorded(optax.adamw(1e-2), every=2), is_recorded=True)
    run = sonde.open("latest", dir=tmp_path)
    table = run.stats("grad/dense.kernel/norm")
    assert table["step"].to_pylist() == [0, 2, 4]
    wanted = [np.linalg.norm(np.asarray(grads[step]["dense"]["kernel"])) for step in (0, 2, 4)]
    np.testing.assert_allclose(table["value"].to_pylist(), wanted, rtol=1e-6)
    assert run.scalars("loss").num_rows == 5
    assert losses == train(optax.adamw(1e-2), is_recorded=False)[0]


def test_what_it_took_is_said_to_be_unknown_where_every_step_is_recorded(tmp_path):
    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        train(sonde_jax.recorded(optax.sgd(0.1)), is_recorded=True)
    overhead = sonde.open("latest", dir=tmp_path).manifest.facts["overhead"]
    assert overhead["fraction"] is None
    assert "every=10" in overhead["unknown"]


def test_a_matrix_is_sampled_in_all_its_columns():
    x = np.repeat(np.array([[2.0**-20, 1.0]], np.float32), 512 * 512, axis=0).reshape(512, 1024)
    _, hist = to_rows(sketch_arrays([("param", "x", jnp.asarray(x))]))
    assert hist[0, 48 - 20] == pytest.approx(x.size / 2, rel=0.1)


def test_nothing_to_record_warns_once(tmp_path, capsys):
    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        sonde_jax.step({"a": jnp.ones(3)})
        sonde_jax.step({"a": jnp.ones(3)})
    assert capsys.readouterr().err.count("no sketches") == 1


def test_no_loss_changes_by_a_bit(tmp_path):
    plain, _, _ = train(optax.adamw(1e-2), is_recorded=False)
    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        watched, _, _ = train(sonde_jax.recorded(optax.adamw(1e-2)), is_recorded=True)
    assert watched == plain


def net_of(kind: str) -> tuple[Any, Any]:
    linen = pytest.importorskip("flax.linen")
    draw = np.random.default_rng(0)

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            if kind == "dense":
                x = linen.tanh(linen.Dense(16)(linen.gelu(linen.Dense(16)(x))))
            elif kind == "conv":
                x = linen.relu(linen.LayerNorm()(linen.Conv(4, (3, 3))(x)))
                x = linen.relu(linen.GroupNorm(2)(linen.Conv(4, (3, 3))(x))).mean((1, 2))
            else:
                x = linen.RNN(linen.LSTMCell(5))(linen.Embed(50, 4)(x))[:, -1]
            return linen.Dense(1)(x)

    inputs = {"dense": draw.standard_normal((32, 8)), "conv": draw.standard_normal((32, 6, 6, 3))}
    values = inputs.get(kind)
    x = jnp.asarray(draw.integers(0, 50, (32, 6)) if values is None else values.astype(np.float32))
    return Net(), x


@pytest.mark.parametrize("where", ["in", "out"])
@pytest.mark.parametrize("kind", ["dense", "conv", "recurrent"])
def test_no_bit_of_a_flax_model_changes_in_sixty_steps(tmp_path, kind, where):
    """On the CPU: XLA makes no promise of it, and the documentation says so."""
    model, x = net_of(kind)
    y = jnp.asarray(np.random.default_rng(1).standard_normal((32, 1)), jnp.float32)

    def trained(wrap: Any) -> tuple[list[float], list[bytes]]:
        clip, adam = optax.clip_by_global_norm(0.5), optax.adamw(1e-2)
        optimizer = wrap(optax.chain(clip, adam)) if where == "out" else optax.chain(clip, wrap(adam))
        params = model.init(jax.random.key(0), x[:4])
        state = optimizer.init(params)

        @jax.jit
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda params: ((model.apply(params, x) - y) ** 2).mean())(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        losses = []
        for number in range(60):
            rows = slice(8 * (number % 4), 8 * (number % 4) + 8)
            params, state, loss = step(params, state, x[rows], y[rows])
            if wrap is sonde_jax.recorded:
                sonde_jax.step(state, loss=loss)
            losses.append(float(loss))
        return losses, [np.asarray(leaf).tobytes() for leaf in jax.tree_util.tree_leaves(params)]

    plain = trained(lambda optimizer: optimizer)
    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        assert trained(sonde_jax.recorded) == plain
    assert set(sonde.open("latest", dir=tmp_path).stats("grad/*/norm")["step"].to_pylist()) == set(range(60))


def test_a_tree_by_hand(tmp_path):
    params, loss_fn, _ = make()
    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        stats = jax.jit(lambda p: sonde_jax.sketch({"grad": jax.grad(loss_fn)(p)}))(params)
        sonde_jax.step(stats)
    assert sonde.open("latest", dir=tmp_path).stats("grad/*/rms").num_rows == 3


def test_kinds_must_be_named():
    with pytest.raises(UsageError, match='kind="grad"'):
        sonde_jax.sketch({"dense": jnp.ones(3)})


def test_reached_by_its_name():
    assert sonde.jax is sonde_jax


class TestFlax:
    @pytest.mark.parametrize(("depth", "rules"), [(9, {"vanishing_gradients"}), (1, set())])
    def test_a_rule_that_needs_the_order_of_layers_speaks_of_a_planted_fault(self, tmp_path, depth, rules):
        nn = pytest.importorskip("flax.linen")

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                for _ in range(depth):
                    x = nn.sigmoid(nn.Dense(16)(x))
                return nn.Dense(1, kernel_init=nn.initializers.normal(0.05))(x)

        x = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
        y = np.sign(x[:, :1] * x[:, 1:2])
        params, tx = jax.jit(Net().init)(jax.random.key(0), x), sonde_jax.recorded(optax.adam(1e-2))
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            loss, grads = jax.value_and_grad(lambda p: ((Net().apply(p, x) - y) ** 2).mean())(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        with sonde.init(project="jax", dir=tmp_path, verbose=False):
            sonde_jax.describe(Net(), x)
            for _ in range(40):
                params, state, loss = step(params, state)
                sonde_jax.step(state, loss=loss)
        run = sonde.open("latest", dir=tmp_path)
        modules = run.structure()["modules"]
        names = [f"Dense_{i}" for i in range(depth + 1)]
        assert [(m["name"], m["kind"]) for m in modules] == [("model", "container"), *((n, "linear") for n in names)]
        assert [m["order"] for m in modules] == list(range(depth + 2))
        assert {finding.rule for finding in run.findings() if finding.severity > "info"} == rules

    def test_linen(self, tmp_path):
        nn = pytest.importorskip("flax.linen")

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))

        x = jnp.ones((2, 4))
        params = Net().init(jax.random.key(0), x)
        tx = sonde_jax.recorded(optax.sgd(0.1))
        state = tx.init(params)
        with sonde.init(project="jax", dir=tmp_path, verbose=False):
            for _ in range(3):
                grads = jax.grad(lambda p: (Net().apply(p, x) ** 2).sum())(params)
                updates, state = tx.update(grads, state, params)
                params = optax.apply_updates(params, updates)
                sonde_jax.step(state)
        run = sonde.open("latest", dir=tmp_path)
        wanted = {"Dense_0.kernel", "Dense_0.bias", "Dense_1.kernel", "Dense_1.bias"}
        assert set(run.sites("grad/*")["site"].to_pylist()) == wanted

    def test_nnx(self, tmp_path):
        nnx = pytest.importorskip("flax.nnx")

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

            def __call__(self, x):
                return self.second(jnp.tanh(self.first(x)))

        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, sonde_jax.recorded(optax.sgd(0.1)), wrt=nnx.Param)
        x = jnp.ones((2, 4))

        @nnx.jit
        def train_step(model, optimizer):
            loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
            stats = sonde_jax.sketch({"custom": {"by_hand": grads}})
            optimizer.update(model, grads)
            return loss, stats

        with sonde.init(project="jax", dir=tmp_path, verbose=False):
            sonde_jax.describe(model)
            for _ in range(3):
                loss, stats = train_step(model, optimizer)
                sonde_jax.step((optimizer.opt_state, stats), loss=loss)
        run = sonde.open("latest", dir=tmp_path)
        wanted = {"first.kernel", "first.bias", "second.kernel", "second.bias"}
        assert set(run.sites("grad/*")["site"].to_pylist()) == wanted
        norms = run.stats("grad/first.kernel/norm")
        assert norms["step"].to_pylist() == [0, 1, 2]
        assert norms["value"].to_pylist() == run.stats("custom/by_hand.first.kernel/norm")["value"].to_pylist()
        assert [module["name"] for module in run.structure()["modules"]] == ["model", "first", "second"]


SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sonde.adapters.jax.sketches import sketch_arrays, to_rows
from sonde.reduce.numpy import sketch
assert jax.device_count() == 4
x = np.random.default_rng(0).standard_normal((64, 33)).astype(np.float32)
mesh = Mesh(np.array(jax.devices()), ("data",))
spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
rows, _ = to_rows(jax.jit(lambda x: sketch_arrays([("param", "x", x)]))(spread))
np.testing.assert_allclose(rows[0, :9], sketch(x).rows[:9], rtol=1e-5)
many = jax.pmap(lambda x: sketch_arrays([("param", "x", x)]))(x.reshape(4, 16, 33))
import sonde
import sonde.adapters.jax as sonde_jax
with sonde.init(project="pmap", dir=sys.argv[1], verbose=False):
    sonde_jax.step(many)
seen = sonde.open("latest", dir=sys.argv[1]).stats("param/x/norm")["value"].to_pylist()
np.testing.assert_allclose(seen, [sketch(x[:16]).norm], rtol=1e-5)  # the first device's
print("alike")
"""


def test_of_a_sharded_array_the_whole(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "alike"


def numbers(run: Any, name: str) -> dict[int, float]:
    table = run.scalars(name)
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


@pytest.mark.parametrize("is_outside", [True, False])
def test_injected_hyperparameters_are_recorded_as_they_were_used(tmp_path, is_outside):
    schedule = optax.exponential_decay(0.1, 1, 0.5)
    if is_outside:
        optimizer = optax.inject_hyperparams(lambda learning_rate: sonde_jax.recorded(optax.sgd(learning_rate)))(
            learning_rate=schedule
        )
    else:
        optimizer = sonde_jax.recorded(optax.inject_hyperparams(optax.adamw)(learning_rate=schedule, b2=0.9))
    with sonde.init(project="jax", dir=tmp_path, verbose=False) as session:
        train(optimizer, is_recorded=True, donate=True)
        assert session.recording.breaker.num_errors == 0
    run = sonde.open("latest", dir=tmp_path)
    assert numbers(run, "optim/lr") == {step: pytest.approx(0.1 * 0.5**step) for step in range(5)}
    if not is_outside:
        assert numbers(run, "optim/beta2") == {0: pytest.approx(0.9)}


def test_injected_hyperparameters_that_are_set_by_hand_and_of_several_groups(tmp_path):
    params, loss_fn, _ = make()
    rates = {"body": 0.1, "head": 0.2}
    parts = {
        name: optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9) for name, rate in rates.items()
    }
    optimizer = sonde_jax.recorded(optax.partition(parts, {"dense": "body", "out": "head"}))
    state = optimizer.init(params)
    jitted = jax.jit(lambda params, state: optimizer.update(jax.grad(loss_fn)(params), state, params))
    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        for step in range(4):
            if step == 3:
                state.inner.inner_states["head"].inner_state.hyperparams["momentum"] = jnp.asarray(0.5)
            updates, state = jitted(params, state)
            params = optax.apply_updates(params, updates)
            sonde_jax.step(state)
    run = sonde.open("latest", dir=tmp_path)
    assert numbers(run, "optim/lr") == dict.fromkeys(range(4), pytest.approx(0.1))
    assert numbers(run, "optim/group1/lr") == dict.fromkeys(range(4), pytest.approx(0.2))
    assert numbers(run, "optim/momentum") == {0: pytest.approx(0.9)}
    assert numbers(run, "optim/group1/momentum") == {0: pytest.approx(0.9), 2: pytest.approx(0.9), 3: 0.5}


def test_hyperparameters_of_an_nnx_optimizer(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 5))
    optimizer = nnx.Optimizer(model, sonde_jax.recorded(tx), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda model: (model(jnp.ones((2, 3))) ** 2).mean())(model))

    with sonde.init(project="jax", dir=tmp_path, verbose=False):
        for _ in range(3):
            step(model, optimizer)
            sonde_jax.step(optimizer)
    run = sonde.open("latest", dir=tmp_path)
    assert list(numbers(run, "optim/lr").values()) == pytest.approx([0.1, 0.08, 0.06])
    assert run.stats("grad/kernel/norm").num_rows == 3


def test_whole_arrays_of_chosen_steps_are_kept_bit_by_bit(tmp_path):
    """Parameters and states as they were, although the step donates them; gradients as the step returned them."""
    params = {"params": {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3, jnp.bfloat16)}}}
    tx = sonde_jax.recorded(optax.adam(1e-2))
    x = jnp.arange(8.0).reshape(2, 4)

    def loss_fn(params: Any) -> Any:
        return jnp.mean((x @ params["params"]["dense"]["kernel"] + params["params"]["dense"]["bias"]) ** 2)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    state, wanted = tx.init(params), {}
    with sonde.init(dir=tmp_path) as session:
        sonde_jax.snapshots(sonde.Snapshots(when=2, kinds="param,grad,optim", sites="!*.bias*"))
        for at in range(5):
            if at == 3:
                sonde.snapshot("param")
            mu = state.inner[0].mu["params"]["dense"]["kernel"]
            wanted[at] = [np.array(params["params"]["dense"]["kernel"]), np.array(mu)]
            is_kept = sonde_jax.keep(param=params, optim=state)
            params, state, grads = step(params, state)
            assert sonde_jax.keep(grad=grads) == is_kept == (at != 1)
            wanted[at].append(np.array(grads["params"]["dense"]["kernel"]))
            sonde_jax.step(state)
    run = sonde.open(session.path)
    assert run.tensors.snapshots()["step"].to_pylist() == [0, 2, 3, 4]
    assert run.warnings == []
    for at in (0, 2, 4):
        found = run.tensors.snapshot(at)
        assert sorted(found) == [
            "grad/dense.kernel",
            "optim/0.count",
            "optim/dense.kernel.mu",
            "optim/dense.kernel.nu",
            "param/dense.kernel",
        ]
        names = ("param/dense.kernel", "optim/dense.kernel.mu", "grad/dense.kernel")
        for name, array in zip(names, wanted[at], strict=True):
            assert found[name].tobytes() == array.tobytes(), (at, name)
    assert list(run.tensors.snapshot(3)) == ["param/dense.kernel"]


def test_a_kind_that_is_planned_and_never_passed_warns_once(tmp_path):
    with sonde.init(dir=tmp_path) as session:
        sonde_jax.snapshots(sonde.Snapshots(when=1, kinds="param,grad"))
        for _ in range(2):
            sonde_jax.keep(param={"w": jnp.ones(2, jnp.bfloat16)})
            sonde_jax.step(loss=1.0)
        with pytest.raises(UsageError, match="params"):
            sonde_jax.keep(params={})
    run = sonde.open(session.path)
    assert run.tensors.snapshot(1)["param/w"].astype("float32").tolist() == [1, 1]
    assert len([warning for warning in run.warnings if '"grad"' in str(warning)]) == 1


def test_a_plan_that_jax_cannot_follow_is_refused(tmp_path):
    with sonde.init(dir=tmp_path), pytest.raises(UsageError, match="probe"):
        sonde_jax.snapshots(sonde.Snapshots(probe=np.ones(2)))
