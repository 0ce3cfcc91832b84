"""The way of accelerators: on CPU tensors here, where every machine can check it, and on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sonde.reduce.cpu.plan import Held, Plan
from sonde.reduce.dense import work_dtype
from sonde.reduce.gpu.device import device_rows
from sonde.reduce.numpy import sketch
from sonde.reduce.optimizer_pass import Moments, OptimizerPass
from sonde.reduce.scalars import PendingScalars
from sonde.reduce.torch import Reducer, resolve_all, scale_rows, set_raw
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE, MAX, MIN, SUM, SUMSQ_RAW, ZERO, N

SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3e38, -1e25]


def rows_of(tensors: list[torch.Tensor], *, large: int = 1 << 17, row: int | None = None) -> np.ndarray:
    """As `Part` does it on an accelerator, in the order of the list."""
    plan = Plan([t.numel() for t in tensors], work_dtype(tensors[0]), tensors[0].device, large=large)
    held = Held(plan, [t.shape for t in tensors])
    held.load(tensors)
    rows = device_rows(plan, plan.blocks(held, tensors)).cpu().numpy()
    back = np.empty_like(rows)
    back[plan.order] = rows
    return back


def check(ways, tensors: list[torch.Tensor], **options: int) -> None:
    for row, tensor in zip(rows_of(tensors, **options), tensors, strict=True):
        ways.assert_same(row, sketch(tensor.cpu().double().numpy(), histogram=False).rows)


@given(st.data())
def test_device_rows_are_the_specification(ways, data):
    sizes = data.draw(
        st.lists(st.integers(1, 3) | st.integers(510, 514) | st.integers(1, 3000), min_size=1, max_size=6)
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    tensors = []
    for index, size in enumerate(sizes):
        x = torch.randn(size, generator=torch.Generator().manual_seed(index)) - data.draw(st.sampled_from([0, 3, -3]))
        for place, value in data.draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from(SPECIAL))).items():
            x[place] = value
        tensors.append(x.to(dtype))
    check(ways, tensors, large=data.draw(st.sampled_from([1, 600, 1 << 17])))


def test_dtypes_that_share_a_work_dtype(ways):
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    check(ways, [x, x.to(torch.bfloat16), x.to(torch.float16), x.to(torch.float8_e5m2)], large=2000)
    check(ways, [x.double(), (x * 10).to(torch.int32), x > 0], large=2000)


def test_tails_on_device_rows(ways):
    check(ways, [torch.full((size,), sign * 5.0) for size in (1, 511, 512, 513) for sign in (1, -1)])


def test_same_bits_twice():
    xs = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, 900, 5000)]
    np.testing.assert_array_equal(rows_of(xs), rows_of(xs))


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


class OnGpu:
    pytestmark = gpu


class TestOnGpu(OnGpu):
    """The same on a real device."""

    def tensors(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        xs = [torch.randn(size, generator=generator) - 0.5 for size in (1, 3, 4095, 4096, 4097, 300_000)]
        xs[2][::3] = 0.0
        xs[3][7], xs[3][9] = float("nan"), float("inf")
        xs[5][-1] = 50.0
        x = xs[5]
        xs += [
            x.to(torch.bfloat16),
            x.to(torch.float16),
            x.double(),
            (x * 9).to(torch.int64),
            x.view(600, 500).t(),
            x[::7],
        ]
        xs += [x.to(torch.float8_e4m3fn), torch.full((4097,), 2.0), torch.full((4097,), -2.0)]
        return xs

    @pytest.mark.parametrize("way", ["add", "add_all"])
    def test_every_kind(self, ways, way):
        xs = self.tensors()
        found = ways.rows(way, [x.cuda() for x in xs], histogram=True)
        assert sorted(found) == list(range(len(xs)))
        for key, x in enumerate(xs):
            ways.assert_same(found[key].rows, sketch(ways.as_numpy(x), histogram=False).rows, key)
            got = found[key]
            assert got.hist.sum() == pytest.approx(got.n - got.nan - got.inf - got.zero)

    @pytest.mark.parametrize("way", ["add", "add_all"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_what_float32_cannot_square(self, ways, way, dtype):
        scales = [1.0, 1e-17, 1e-20, 1e-30, 1e-40, 1e-44, 1e25, 1e37]
        xs = [torch.randn(40_000, generator=torch.Generator().manual_seed(seed)) for seed in range(40)]
        xs = [(x * scales[seed % 8]).to(dtype) for seed, x in enumerate(xs)]
        xs[9][3], xs[20][-1] = torch.nan, -torch.inf
        found = ways.rows(way, [x.cuda() for x in xs])
        for key, x in enumerate(xs):
            ways.assert_same(found[key].rows, sketch(ways.as_numpy(x), histogram=False).rows, key)

    @pytest.mark.parametrize("way", ["add", "add_all"])
    def test_odd_kinds(self, ways, way):
        dense = torch.zeros(40, 50)
        dense[3, 4], dense[7, 8] = 3.0, 2.0
        xs = [dense.to_sparse(), torch.complex(dense, dense + 1), torch.empty(0), torch.tensor(4.0)]
        arrays = [dense.numpy(), torch.complex(dense, dense + 1).numpy(), np.zeros(0), np.array(4.0)]
        found = ways.rows(way, [x.cuda() for x in xs])
        for key, array in enumerate(arrays):
            ways.assert_same(found[key].rows, sketch(array, histogram=False).rows, key)

    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_nothing_waits_for_the_device(self, ways):
        xs = [x.cuda() for x in self.tensors()]
        params = [torch.nn.Parameter(x.clone()) for x in xs[:5]]
        grads = [torch.randn_like(p) for p in params]
        moments = Moments(grads, [g * g for g in grads], correction=torch.tensor(0.5, device="cuda"), floor=1e-16)
        factors = {20: torch.tensor(0.5, device="cuda")}
        scale = torch.tensor(2.0, device="cuda")
        reducer = Reducer()
        optimizer_pass = OptimizerPass(reducer)

        def step() -> list:
            for key, x in enumerate(xs):
                reducer.add(key, x, histogram=True)
            for table in reducer.add_all("list", list(range(20, 20 + len(xs))), xs, histogram=True):
                scale_rows(table, scale)
                set_raw(table, factors)
            optimizer_pass.before("p", list(range(50, 55)), params, sketch=True, keep=True, histogram=True)
            optimizer_pass.after("p", list(range(60, 65)), params, grads=grads, moments=moments, histogram=True)
            self.pending = PendingScalars([factors[20]])
            return reducer.take()

        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            first = step()  # also the first time, when all the memory is made
            second = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for tables in (first, second):
            keys, rows, _, _ = resolve_all(tables)
            rows = dict(zip(keys.tolist(), rows, strict=True))
            for key, x in enumerate(xs):
                ways.assert_same(rows[key], sketch(ways.as_numpy(x.cpu()), histogram=False).rows, key)
            assert rows[20][SUMSQ_RAW] == pytest.approx(float(xs[0].double().square().sum()) * 16)
        assert self.pending.resolve() == [0.5]

    def test_update_and_pairs(self, ways):
        xs = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, 5000, 5_000_000)]
        xs.append(xs[2].view(2000, 2500).t())
        params = [torch.nn.Parameter(x.cuda()) for x in xs]
        optimizer = torch.optim.Adam(params, lr=0.1)
        for p in params:
            p.grad = torch.randn_like(p)
        reducer = Reducer()
        optimizer_pass = OptimizerPass(reducer)
        optimizer_pass.before("p", [0, 1, 2, 3], params, sketch=True, keep=True, histogram=False)
        optimizer.step()
        states = [optimizer.state[p] for p in params]
        moments = Moments(
            [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], correction=0.001, floor=1e-16
        )
        optimizer_pass.after("p", [10, 11, 12, 13], params, grads=[p.grad for p in params], moments=moments)
        keys, rows, _, _ = resolve_all(reducer.take())
        rows = dict(zip(keys.tolist(), rows, strict=True))
        for key, (p, before) in enumerate(zip(params, xs, strict=True)):
            update = (p.detach().cpu() - before).numpy()
            grad = p.grad.cpu().double().numpy()
            m, v = (states[key][name].cpu().double().numpy() for name in ("exp_avg", "exp_avg_sq"))
            ways.assert_same(rows[10 + key], sketch(update, histogram=False).rows, key)
            for field, products in [
                (GRAD_UPDATE, grad * update),
                (GRAD_MOMENT, grad * m),
                (GRAD_SQ_OVER_V, grad**2 / np.maximum(v, 1e-16) * 0.001),
            ]:
                assert abs(rows[10 + key][field] - products.sum()) <= 2e-6 * np.abs(products).sum()

    def test_tensors_with_gaps(self, ways):
        x = torch.randn(200, 30)
        views = [
            lambda x: x.view(-1)[::2],
            lambda x: x[..., 0],
            lambda x: x[:, ::2],
            lambda x: x[:, 3:],
            lambda x: x.t(),
            lambda x: x[0, :1].expand(50),
        ]
        near, far = [view(x) for view in views], [view(x.cuda()) for view in views]
        reducer = Reducer()
        for key, one in enumerate(far):
            reducer.add(key, one)
        reducer.add_all("list", [10 + key for key in range(len(far))], far)
        keys, rows, _, _ = resolve_all(reducer.take())
        rows = dict(zip(keys.tolist(), rows, strict=True))
        for key, one in enumerate(near):
            wanted = sketch(one.numpy(), histogram=False).rows
            ways.assert_same(rows[key], wanted, key)
            ways.assert_same(rows[10 + key], wanted, key)

    def test_tensor_may_change_right_after_it_was_added(self):
        reducer = Reducer()
        x = torch.ones(1_000_000, device="cuda")
        for _ in range(20):
            x.fill_(1.0)
            reducer.add(1, x)
            x.fill_(7.0)
        _, rows, _, _ = resolve_all(reducer.take())
        assert (rows[0, N], rows[0, SUM], rows[0, MIN], rows[0, MAX], rows[0, ZERO]) == (2e7, 2e7, 1.0, 1.0, 0)
