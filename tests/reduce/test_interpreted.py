"""The GPU kernels, interpreted on the CPU: with Triton and TRITON_INTERPRET=1 any machine can check their numbers."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from sonde.reduce.numpy import sketch
from sonde.reduce.sample import sample
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE, MAX, MIN, SUM, SUMABS, SUMSQ, ZERO

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning"),  # the interpreter's numpy
]
CPU = torch.device("cpu")
SHAPES = [(33_000,), (7,), (32_768,), (130, 31)]


def make(dtype: torch.dtype = torch.float32, scale: float = 1.0, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


def check_row(ways, row: torch.Tensor, tensor: torch.Tensor, note: object = "") -> None:
    ways.assert_same(row.numpy(), sketch(ways.as_numpy(tensor), histogram=False).rows, note)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_single_tensors(ways, dtype):
    from sonde.reduce.gpu.triton_single import Bank

    xs = make(dtype, 3.0)
    if dtype.is_floating_point:
        xs[0][5], xs[0][9], xs[3][0, 0] = float("nan"), -float("inf"), 0.0
    bank = Bank(CPU, 64)
    for _ in range(2):
        for key, x in enumerate(xs):
            first = bank.read(key, x, turn=3)
        bank.again(9, first)
        reads, rows, samples = bank.rows()
        assert [read.key for read in reads] == [0, 1, 2, 3, 9]
        for row, x, read in zip(rows, [*xs, xs[-1]], reads, strict=True):
            check_row(ways, row, x, read.key)
            wanted = sample(x, 64, 3).double()
            torch.testing.assert_close(samples[read.sample_row][: len(wanted)], wanted, equal_nan=True)
            assert read.sampled == len(wanted)


def test_tensors_with_gaps(ways):
    from sonde.reduce.gpu.triton import ChunkList
    from sonde.reduce.gpu.triton_single import Bank

    x = torch.randn(200, 30)
    xs = [x.view(-1)[::2], x[..., 0], x[:, ::2], x[:, 3:], x.t(), x[0, :1].expand(50)]
    bank, chunks = Bank(CPU, 64), ChunkList([x.numel() for x in xs], torch.float32, CPU)
    for key, x in enumerate(xs):
        bank.read(key, x)
    for rows in (bank.rows()[1], chunks.rows(xs)):
        for key, (row, x) in enumerate(zip(rows, xs, strict=True)):
            check_row(ways, row, x, key)


def test_samples_of_a_list():
    from sonde.reduce.gpu.triton import ChunkList

    xs = make()
    chunks = ChunkList([x.numel() for x in xs], torch.float32, CPU)
    chunks.rows(xs)
    for turn in (0, 1, 12345):
        for got, x in zip(chunks.samples(100, turn), xs, strict=True):
            wanted = sample(x, 100, turn)
            assert torch.equal(got[: len(wanted)], wanted)
            assert not got[len(wanted) :].any()


def odd_ones(num: int, size: int) -> list[torch.Tensor]:
    """Among plain tensors some whose squares leave float32, and some that are not finite: more than one program's."""
    xs = [torch.randn(size, generator=torch.Generator().manual_seed(seed)) for seed in range(num)]
    for x, scale in zip(xs[2::3], [1e-17, 1e-20, 1e-30, 1e-40, 1e-44, 1e25, 1e37] * num, strict=False):
        x *= scale
    xs[1][3], xs[num // 2][5], xs[num // 2][-1], xs[-1][0] = torch.nan, torch.inf, -torch.inf, torch.nan
    xs[4].zero_()
    return xs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_done_again_may_lie_anywhere(ways, dtype):
    from sonde.reduce.gpu.triton import ChunkList

    xs = [x.to(dtype) for x in odd_ones(21, 300)]
    if dtype == torch.bfloat16:  # the interpreter, unlike a GPU, gets the smallest of these wrong
        xs = [torch.where(x.abs() < 1.2e-38, 0, x) for x in xs]
    chunks = ChunkList([x.numel() for x in xs], dtype, CPU)
    for row, x in zip(chunks.rows(xs), xs, strict=True):
        check_row(ways, row, x)


def test_what_is_done_again_in_a_step_may_lie_anywhere(ways):
    from sonde.reduce.gpu.triton_step import StepChunks
    from sonde.session.model.predicted_update import rule_of

    params = [torch.nn.Parameter(x) for x in odd_ones(21, 300)[::-1]]
    for p, g in zip(params, odd_ones(21, 300), strict=True):
        p.grad = g
    steps = StepChunks([p.numel() for p in params], CPU, size=128)
    grads = [p.grad for p in params]
    rows, _ = steps.rows(params, grads, rule_of(torch.optim.SGD(params, lr=0.1), params), 0)
    for t, p in enumerate(params):
        check_row(ways, rows[0, t], p.detach())
        check_row(ways, rows[1, t], grads[t])


OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True, maximize=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.1),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_is_known_before_the_step(ways, name):
    from sonde.reduce.gpu.triton_step import StepChunks
    from sonde.session.model.predicted_update import rule_of

    params = [torch.nn.Parameter(x) for x in make()]
    optimizer = OPTIMIZERS[name](params)
    steps = StepChunks([p.numel() for p in params], CPU, size=128)
    for turn in range(2):
        for p, g in zip(params, make(scale=10.0 ** -(2 + 2 * turn), seed=turn + 1), strict=True):
            p.grad = g
        rule = rule_of(optimizer, params)
        before = [p.detach().clone() for p in params]
        grads = [p.grad for p in params]
        rows, samples = steps.rows(params, grads, rule, turn)
        rows = rows.clone()
        optimizer.step()
        checked = steps.verify(params, samples, turn)
        assert (checked[:, 0] <= checked[:, 1]).all(), checked
        for t, p in enumerate(params):
            check_row(ways, rows[0, t], before[t])
            check_row(ways, rows[1, t], grads[t])
            update = (p.detach() - before[t]).double().numpy()
            for field in (SUMSQ, SUMABS):
                wanted = sketch(update, histogram=False).rows[field]
                assert abs(rows[4, t, field] - wanted) <= 1e-3 * wanted + 1e-12, (name, turn, t)
            assert (
                abs(rows[4, t, GRAD_UPDATE] - (grads[t].numpy() * update).sum())
                <= 1e-3 * np.abs(grads[t].numpy() * update).sum()
            )
            for stream, state in zip((2, 3), rule.states, strict=False):
                value = optimizer.state[p][state].double().numpy()
                wanted = sketch(value, histogram=False).rows
                for field in (SUM, SUMSQ, SUMABS, MIN, MAX, ZERO):
                    assert abs(rows[stream, t, field] - wanted[field]) <= 1e-5 * max(abs(wanted[field]), 1e-9), field
            if "adam" in name:
                state = optimizer.state[p]
                beta2, eps = optimizer.param_groups[0]["betas"][1], optimizer.param_groups[0]["eps"]
                correction = 1 - beta2 ** (turn + 1)
                lag = (grads[t].double() ** 2 / state["exp_avg_sq"].clamp(min=eps**2 * correction) * correction).sum()
                assert rows[4, t, GRAD_SQ_OVER_V].item() == pytest.approx(lag.item(), rel=1e-3)
                moment = (grads[t] * state["exp_avg"]).double().sum().item()
                assert abs(rows[4, t, GRAD_MOMENT] - moment) <= 1e-4 * (grads[t] * state["exp_avg"]).abs().sum()


def test_step_with_nan_and_a_skipped_step(ways):
    from sonde.reduce.gpu.triton_step import StepChunks
    from sonde.session.model.predicted_update import rule_of

    params = [torch.nn.Parameter(x) for x in make()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for p, g in zip(params, make(seed=1), strict=True):
        p.grad = g
    params[2].grad.zero_()  # nothing but zeros in a whole chunk: the largest count there is
    optimizer.step()
    params[2].grad.zero_()
    params[0].grad[3], params[3].grad[4] = float("nan"), float("inf")
    steps = StepChunks([p.numel() for p in params], CPU, size=128)
    grads = [p.grad for p in params]
    rule = rule_of(optimizer, params)
    rows, _ = steps.rows(params, grads, rule, 0)
    for t in range(len(params)):
        check_row(ways, rows[1, t], grads[t])
    assert rows[4, 0, 1] == 1  # one weight becomes NaN
    rule.found_inf, rule.grad_scale = torch.tensor(1.0), torch.tensor(4.0)
    rows, samples = steps.rows(params, grads, rule, 0)
    checked = steps.verify(params, samples, 0)
    assert (checked[:, 0] == 0).all()
    for t, p in enumerate(params):
        check_row(ways, rows[1, t], grads[t] / 4)
        check_row(ways, rows[2, t], optimizer.state[p]["exp_avg"])
        check_row(ways, rows[4, t], torch.zeros_like(p))


def test_a_wrong_formula_is_found_out():
    from sonde.reduce.gpu.triton_step import StepChunks
    from sonde.session.model.predicted_update import rule_of

    params = [torch.nn.Parameter(x) for x in make()]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for p, g in zip(params, make(seed=1), strict=True):
        p.grad = g
    steps = StepChunks([p.numel() for p in params], CPU, size=128)
    _, samples = steps.rows(params, [p.grad for p in params], rule_of(optimizer, params), 0)
    optimizer.param_groups[0]["lr"] = 1.02e-2
    optimizer.step()
    checked = steps.verify(params, samples, 0)
    assert (checked[:, 0] > checked[:, 1]).all()


KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e5m2]


def slow_code(x: torch.Tensor) -> int:
    """0: finite, 1: infinity, 2: NaN."""
    values = torch.view_as_real(x).double().numpy() if x.is_complex() else x.double().numpy()
    return 2 if np.isnan(values).any() else 1 if np.isinf(values).any() else 0


def spoiled(dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of several blocks, and of less than one, with a bad element at the ends, in the middle, or nowhere."""
    xs = [torch.randn(size).mul(3).to(dtype) for size in (1, 5, 4096, 4097, 30_000, 30_000, 30_000, 30_000)]
    xs[1][4], xs[3][4096], xs[4][0], xs[5][17_000] = torch.nan, -torch.inf, torch.inf, torch.nan
    xs[6][29_999] = torch.nan
    xs[6][3] = torch.inf
    return xs


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_nonfinite_tensors_are_found_whatever_their_type(dtype):
    from sonde.reduce.gpu.triton_finite import find, find_one, new_codes, row_of

    xs = [*spoiled(dtype), *spoiled(torch.float32), torch.randn(40, 50).to(dtype).t()]
    wanted = [slow_code(x) for x in xs]
    codes = new_codes(len(xs), CPU)
    find([row_of(x) for x in xs], codes)
    assert codes.tolist() == [2, *wanted]
    one_by_one = new_codes(len(xs), CPU)
    for place, x in enumerate(xs, 1):
        assert find_one(x.t().contiguous() if x.dim() == 2 else x, one_by_one, place, needed=codes)
    assert one_by_one.tolist() == [0, *wanted]


def test_extreme_but_finite_values_are_finite():
    from sonde.reduce.gpu.triton_finite import find, new_codes, row_of

    limits = [(torch.finfo(dtype), dtype) for dtype in KINDS[:4]]
    xs = [torch.tensor([info.max, info.min, info.tiny, -0.0], dtype=dtype) for info, dtype in limits]
    codes = new_codes(len(xs), CPU)
    find([row_of(x) for x in xs], codes)
    assert not codes.any()


def test_one_byte_types_with_a_nan_but_no_infinity():
    from sonde.reduce.gpu.triton_finite import find, find_one, new_codes, row_of

    x = torch.randn(100).clamp(-400, 400).to(torch.float8_e4m3fn)
    y = x.clone()
    y[7] = torch.nan
    x[3] = 448.0
    codes = new_codes(2, CPU)
    find([row_of(x), row_of(y)], codes)
    assert codes.tolist() == [2, 0, 2]
    assert find_one(y, codes, 1, needed=codes)
    assert codes.tolist() == [2, 2, 2]
    assert row_of(torch.ones(3, dtype=torch.int32)) is None


def test_nothing_is_read_unless_it_is_needed():
    from sonde.reduce.gpu.triton_finite import find, find_one, new_codes, row_of

    xs = spoiled(torch.bfloat16)
    codes, needed = new_codes(len(xs), CPU), torch.zeros(1, dtype=torch.int32)
    find([row_of(x) for x in xs], codes, needed=needed)
    find_one(xs[1], codes, 1, needed=needed)
    assert not codes.any()
    needed[0] = 1
    find([row_of(x) for x in xs], codes, needed=needed)
    assert codes.tolist() == [2, *map(slow_code, xs)]


def test_a_sample_reads_one_block_in_several():
    from sonde.reduce.gpu.triton_finite import BLOCK, find, new_codes, row_of

    x = torch.zeros(12 * BLOCK)
    for place, is_seen in ((0, True), (BLOCK, False), (3 * BLOCK, True), (9 * BLOCK + 5, True), (11 * BLOCK, False)):
        x.zero_()[place] = torch.nan
        codes = new_codes(1, CPU)
        find([row_of(x, 3)], codes)
        assert bool(codes[1]) == is_seen, place


@pytest.mark.parametrize("at", [None, 0, 3, 5])
def test_a_scan_reads_everything_if_its_end_is_bad(at, monkeypatch):
    from sonde.reduce.inspect import finite

    monkeypatch.setattr(finite, "AT_ONCE_BYTES", 0)
    xs = [torch.randn(5000).bfloat16() for _ in range(6)]
    if at is not None:
        xs[at][17] = torch.nan
        xs[5][3] = torch.inf
    else:
        xs[2][0] = torch.nan  # it does not reach the end, so nothing reads it
    found = finite.Scan(7)
    found.read_on_gpu([*enumerate(xs)], xs[4:], is_bad=False)
    added = found._add_on_gpu(xs[2], 7), found._add_on_gpu(xs[at or 0], 8)
    found.num = 9
    states = finite.send([found])()[0]
    assert added == (True, True)
    assert states[6] is None
    wanted = [0.0] * 6
    if at is not None:
        wanted[5], wanted[at] = torch.inf, torch.nan
    assert str(states[:6]) == str(wanted)
    assert str(states[7:]) == str([0.0, 0.0 if at is None else torch.nan])
