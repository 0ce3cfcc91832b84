"""What a step did to the parameters: the true update, and the sums paired over gradient, update and moments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sonde.reduce import optimizer_pass as optimizer_pass_module
from sonde.reduce.cpu import plan as plan_module
from sonde.reduce.numpy import sketch
from sonde.reduce.optimizer_pass import Moments, OptimizerPass
from sonde.reduce.torch import Reducer, resolve_all
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE, SUM, SUMABS, ZERO, N
from sonde.schema.stats import Sketch

pytestmark = pytest.mark.usefixtures("each_kernel")

SHAPES = [(3, 5), (700,), (), (64, 33), (512,), (1,)]


def make(shapes=SHAPES, dtype=torch.float32, seed=0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_grads(params, seed=1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if p.is_complex():
            grad = torch.complex(grad, torch.randn(p.shape, generator=generator, dtype=torch.float64))
        p.grad = torch.empty_like(p).copy_(grad)


def as_float64(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor).double().numpy()
    return tensor.double().numpy().copy()


def moments_of(optimizer, params, beta2=0.999, eps=1e-8) -> Moments:
    states = [optimizer.state[p] for p in params]
    taken = states[0]["step"].item()
    return Moments(
        [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], correction=1 - beta2**taken, floor=eps**2
    )


class Stepper:
    """An optimizer pass around real optimizer steps, with everything it should find, in plain float64."""

    def __init__(self, params, optimizer) -> None:
        self.params, self.optimizer = params, optimizer
        self.reducer = Reducer()
        self.optimizer_pass = OptimizerPass(self.reducer)

    def step(self, *, with_grads=True, with_moments=False, histogram=False) -> dict[int, np.ndarray]:
        params = self.params
        keys = list(range(len(params)))
        self.before = [as_float64(p) for p in params]
        self.grads = [None if p.grad is None else as_float64(p.grad) for p in params]
        self.optimizer_pass.before("all", keys, params, sketch=True, keep=True, pairs=with_moments, histogram=histogram)
        self.optimizer.step()
        self.optimizer_pass.after(
            "all",
            [100 + key for key in keys],
            params,
            grads=[p.grad for p in params] if with_grads else None,
            moments=moments_of(self.optimizer, params) if with_moments else None,
            histogram=histogram,
        )
        self.after = [as_float64(p) for p in params]
        keys, rows, self.index, self.hist = resolve_all(self.reducer.take())
        return dict(zip(keys.tolist(), rows, strict=True))

    @property
    def updates(self) -> list[np.ndarray]:
        return [after - before for before, after in zip(self.before, self.after, strict=True)]


@pytest.fixture(params=["packed", "chunks", "large"])
def large_limit(request, monkeypatch):
    """All ways: everything packed into one buffer, the same in chunks some tensors exceed, every tensor by itself."""
    if request.param == "chunks":
        monkeypatch.setattr(plan_module, "CHUNK_ROWS", 2)
    if request.param == "large":
        monkeypatch.setattr(optimizer_pass_module, "LARGE_KEPT", 4)
        monkeypatch.setattr(optimizer_pass_module, "LARGE", 4)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_update_is_what_really_happened(ways, large_limit, dtype, rule):
    params = make(dtype=dtype)
    optimizer = (
        torch.optim.SGD(params, lr=0.1, weight_decay=0.1) if rule == "sgd" else torch.optim.AdamW(params, lr=0.1)
    )
    stepper = Stepper(params, optimizer)
    for step in range(3):
        give_grads(params, step)
        rows = stepper.step(histogram=True)
        assert len(stepper.index) == 2 * len(params)
        for key, (before, update) in enumerate(zip(stepper.before, stepper.updates, strict=True)):
            ways.assert_same(rows[key], sketch(before).rows)
            # float32 parameters: their difference is taken in float32, as it is exact there or nearly so.
            wanted = sketch(update.astype(np.float32) if dtype == torch.float32 else update).rows
            ways.assert_same(rows[100 + key], wanted, (step, key))


@pytest.mark.parametrize("num_still", [3, 90_000])
def test_parameters_that_stay_are_zeros_of_the_update(ways, num_still):
    """Few and many, spread over chunks and rows; they count one by one."""
    params = make([(7,), (300_000,), (700_001,), (5, 100), (100_000,)])
    stepper = Stepper(params, torch.optim.SGD(params, lr=0.1))
    give_grads(params)
    for p in params:
        p.grad.view(-1)[torch.randperm(p.numel(), generator=torch.Generator().manual_seed(0))[:num_still]] = 0
    rows = stepper.step()
    for key, update in enumerate(stepper.updates):
        ways.assert_same(rows[100 + key], sketch(update.astype(np.float32)).rows, key)
        assert rows[100 + key][ZERO] >= min(num_still, params[key].numel())


def assert_paired(found: float, products: np.ndarray, note: object = "") -> None:
    assert abs(found - products.sum()) <= 2e-6 * np.abs(products).sum(), (note, found, products.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_paired_sums(large_limit, dtype):
    params = make(dtype=dtype)
    optimizer = torch.optim.Adam(params, lr=0.05, betas=(0.9, 0.999))
    stepper = Stepper(params, optimizer)
    for step in range(4):
        give_grads(params, step)
        rows = stepper.step(with_moments=True)
        for key, p in enumerate(params):
            grad, update = stepper.grads[key], stepper.updates[key]
            m, v = (as_float64(optimizer.state[p][name]) for name in ("exp_avg", "exp_avg_sq"))
            row = rows[100 + key]
            assert_paired(row[GRAD_UPDATE], grad * update, (step, key))
            assert_paired(row[GRAD_MOMENT], grad * m, (step, key))
            assert_paired(row[GRAD_SQ_OVER_V], grad**2 / np.maximum(v, 1e-16) * (1 - 0.999 ** (step + 1)), (step, key))
            assert np.isnan(rows[key][[GRAD_UPDATE, GRAD_MOMENT, GRAD_SQ_OVER_V]]).all()


def test_second_moment_lag_is_one_for_a_steady_gradient_and_large_after_a_jump():
    params = make([(40, 30)])
    stepper = Stepper(params, torch.optim.Adam(params, lr=1e-3))
    for step in range(8):
        params[0].grad = torch.full_like(params[0], 0.01 if step < 7 else 1.0)
        lag = Sketch(stepper.step(with_moments=True)[100]).second_moment_lag
        if step < 7:
            assert lag == pytest.approx(1.0, rel=1e-4)
    # v_hat = (7 * 1e-4 + 1) / 8 nearly: the new gradient squared is 8 times that.
    assert lag == pytest.approx(8.0, rel=0.01)


def test_second_moment_below_the_floor_says_nothing():
    params = make([(10,)])
    stepper = Stepper(params, torch.optim.Adam(params, lr=1e-3, eps=1e-8))
    params[0].grad = torch.full_like(params[0], 1e-12)
    lag = Sketch(stepper.step(with_moments=True)[100]).second_moment_lag
    assert 0.0 <= lag < 1e-6


def test_each_parameter_has_its_own_correction_and_floor(large_limit):
    """Groups have their own epsilon, and parameters that sat some steps out their own number of steps."""
    params, grads = make([(5,), (700,), (3, 4)]), make([(5,), (700,), (3, 4)], seed=3)
    second = [torch.full_like(p, 1e-6) for p in params]
    correction, floor = np.array([0.5, 0.1, 0.9]), np.array([1e-16, 1e-5, 1e-2])
    reducer = Reducer()
    optimizer_pass = OptimizerPass(reducer)
    optimizer_pass.before("all", [0, 1, 2], params, sketch=True, keep=True, pairs=True)
    moments = Moments(grads, second, correction=correction, floor=floor)
    optimizer_pass.after("all", [100, 101, 102], params, grads=grads, moments=moments)
    keys, rows, _, _ = resolve_all(reducer.take())
    found = dict(zip(keys.tolist(), rows, strict=True))
    for place, grad in enumerate(grads):
        expected = correction[place] * (as_float64(grad) ** 2).sum() / max(1e-6, floor[place])
        assert found[100 + place][GRAD_SQ_OVER_V] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_downhill_is_negative(sign):
    params = make([(600,)])
    give_grads(params)
    stepper = Stepper(params, torch.optim.SGD(params, lr=0.1, maximize=sign < 0))
    assert np.sign(stepper.step()[100][GRAD_UPDATE]) == -sign


def test_a_parameter_without_elements_has_an_update_without_elements():
    params = make([(4, 0), (3,)])
    give_grads(params)
    rows = Stepper(params, torch.optim.Adam(params, lr=0.1)).step(with_moments=True)
    assert sorted(rows) == [0, 1, 100, 101]
    assert (rows[0][N], rows[100][N]) == (0, 0)


def test_products_are_added_in_float64_next_to_a_parameter_in_another_layout():
    params = [torch.nn.Parameter(torch.randn(8, 6, 3, 3).to(memory_format=torch.channels_last)), *make([(50_000,)])]
    give_grads(params)
    stepper = Stepper(params, torch.optim.SGD(params, lr=0.1))
    found = stepper.step()[101][GRAD_UPDATE]
    update = (stepper.after[1] - stepper.before[1]).astype(np.float32)
    products = (stepper.grads[1].astype(np.float32) * update).astype(np.float64)
    assert found == pytest.approx(products.sum(), rel=1e-12)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "grad differs"])
def test_pairs_follow_the_elements_whatever_their_order_in_memory(large_limit, layout):
    weight = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    if layout == "channels_last":
        weight = weight.to(memory_format=torch.channels_last)
    if layout == "transposed":
        weight = weight.transpose(0, 1)
    params = [torch.nn.Parameter(weight), *make([(5,)])]
    give_grads(params)
    if layout == "grad differs":
        params[0].grad = params[0].grad.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(params, lr=0.05)
    stepper = Stepper(params, optimizer)
    rows = stepper.step(with_moments=True)
    for key, p in enumerate(params):
        assert_paired(rows[100 + key][GRAD_UPDATE], stepper.grads[key] * stepper.updates[key])
        assert_paired(rows[100 + key][GRAD_MOMENT], stepper.grads[key] * as_float64(optimizer.state[p]["exp_avg"]))


def test_sparse_gradient_costs_only_its_own_sums(large_limit, ways):
    embedding = torch.nn.Embedding(50, 8, sparse=True)
    linear = torch.nn.Linear(8, 3)
    params = [linear.weight, embedding.weight, linear.bias]
    stepper = Stepper(params, torch.optim.SGD(params, lr=0.1))
    linear(embedding(torch.tensor([1, 2, 2]))).square().sum().backward()
    rows = stepper.step()
    assert np.isnan(rows[101][GRAD_UPDATE])
    ways.assert_same(rows[101], sketch(stepper.updates[1].astype(np.float32), histogram=False).rows)
    for key in (0, 2):
        assert_paired(rows[100 + key][GRAD_UPDATE], stepper.grads[key] * stepper.updates[key])


def test_the_sums_next_to_a_sparse_gradient_are_those_without_it():
    """It does not send the others to a way that sums up in float32."""

    def sums(optimized: int) -> list[float]:
        torch.manual_seed(0)
        embedding, linear = torch.nn.Embedding(50, 64, sparse=True), torch.nn.Linear(64, 300)
        params = [linear.weight, linear.bias, embedding.weight][:optimized]
        stepper = Stepper(params, torch.optim.SGD(params, lr=0.1))
        linear(embedding(torch.arange(40))).square().sum().backward()
        rows = stepper.step()
        return [float(rows[100 + key][GRAD_UPDATE]) for key in (0, 1)]

    assert sums(3) == sums(2)


def test_complex_parameters_are_pairs_of_real_ones(ways, large_limit):
    params = [torch.nn.Parameter(torch.randn(20, 3, dtype=torch.complex64)), *make([(7,)])]
    give_grads(params)
    optimizer = torch.optim.Adam(params, lr=0.05)
    stepper = Stepper(params, optimizer)
    rows = stepper.step(with_moments=True)
    ways.assert_same(rows[100], sketch(stepper.updates[0].astype(np.float32), histogram=False).rows)
    assert_paired(rows[100][GRAD_UPDATE], stepper.grads[0] * stepper.updates[0])
    assert_paired(rows[100][GRAD_MOMENT], stepper.grads[0] * as_float64(optimizer.state[params[0]]["exp_avg"]))
    assert rows[0][N] == 120


def test_nan_in_one_gradient_leaves_the_other_sums_alone():
    params = make([(30,), (40,)])
    give_grads(params)
    params[0].grad[3] = float("nan")
    rows = Stepper(params, torch.optim.SGD(params, lr=0.1)).step()
    assert not np.isfinite(rows[100][GRAD_UPDATE])
    assert rows[101][GRAD_UPDATE] < 0


def test_without_gradients_there_is_an_update_and_no_pairs(ways):
    params = make()
    stepper = Stepper(params, torch.optim.SGD(params, lr=0.1))
    give_grads(params)
    rows = stepper.step(with_grads=False)
    ways.assert_same(rows[101], sketch(stepper.updates[1].astype(np.float32), histogram=False).rows)
    assert np.isnan(rows[101][GRAD_UPDATE])


def test_parameter_that_did_not_move_has_an_update_of_zeros():
    params = make([(30,)])
    stepper = Stepper(params, torch.optim.SGD(params, lr=0.1))
    row = stepper.step(with_grads=False)[100]
    assert (row[N], row[SUM], row[SUMABS], Sketch(row).zero) == (30, 0.0, 0.0, 30)


def test_other_parameters_than_before_give_no_update_rather_than_a_wrong_one():
    reducer = Reducer()
    optimizer_pass = OptimizerPass(reducer)
    a, b = make([(3,), (3,)])
    optimizer_pass.before("with", [1], [a], sketch=False, keep=True, histogram=False)
    optimizer_pass.after("with", [11, 12], [b, a])
    assert reducer.take() == []


def test_after_without_before_does_nothing():
    reducer = Reducer()
    OptimizerPass(reducer).after("never", [1], make([(3,)]))
    assert reducer.take() == []


def test_sketch_and_keep_are_independent():
    reducer = Reducer()
    optimizer_pass = OptimizerPass(reducer)
    params = make([(3,)])
    for sketch_wanted, keep, expected in [
        (True, False, [1]),
        (False, True, [2]),
        (False, False, []),
        (True, True, [1, 2]),
    ]:
        optimizer_pass.before("p", [1], params, sketch=sketch_wanted, keep=keep, histogram=False)
        optimizer_pass.after("p", [2], params)
        assert sorted(resolve_all(reducer.take())[0].tolist()) == expected


def test_parameters_and_gradients_are_not_modified():
    params = make()
    give_grads(params)
    optimizer = torch.optim.Adam(params, lr=0.0)
    before = [p.detach().clone() for p in params], [p.grad.clone() for p in params]
    Stepper(params, optimizer).step(with_moments=True, histogram=True)
    for p, old, grad in zip(params, *before, strict=True):
        assert torch.equal(p, old)
        assert torch.equal(p.grad, grad)


def test_parameters_that_come_and_go_do_not_pile_up_memory():
    reducer = Reducer()
    optimizer_pass = OptimizerPass(reducer)
    params = make([(1000,)] * 6)
    give_grads(params)
    lists = set()
    for step in range(30):
        some = params[: 1 + step % 6]
        optimizer_pass.before("with", list(range(len(some))), some, sketch=True, keep=True, histogram=False)
        optimizer_pass.after("with", list(range(10, 10 + len(some))), some, grads=[p.grad for p in some])
        reducer.take()
        lists.update(id(listed) for _, listed in reducer._lists.values())
    held = [value for value in vars(optimizer_pass).values() if isinstance(value, dict)]
    assert sum(len(value) for value in held) <= 2
    assert len(reducer._lists) == 1
