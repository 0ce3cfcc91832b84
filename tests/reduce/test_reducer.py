"""What a Reducer promises from step to step: merging, aliases, the same bits twice, nothing changed or piling up."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

from sonde.reduce import torch as module
from sonde.reduce.numpy import sketch
from sonde.reduce.torch import Reducer, resolve_all
from sonde.schema.sketch import HIST_N, MAX, SUM, SUMSQ, N

pytestmark = pytest.mark.usefixtures("each_kernel")


def rows_of(reducer: Reducer) -> dict[int, np.ndarray]:
    keys, rows, _, _ = resolve_all(reducer.take())
    return dict(zip(keys.tolist(), rows, strict=True))


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_repeated_key_is_the_sketch_of_everything_under_it(ways):
    reducer = Reducer()
    parts = [noise(700, 1), noise(3, 2), noise(0), noise(1500, 3).double()]
    for part in parts:
        reducer.add(5, part)
    reducer.add_all("list", [5, 6], [noise(40, 4), noise(2, 5)])
    rows = rows_of(reducer)
    ways.assert_same(
        rows[5], sketch(torch.cat([*[p.double() for p in parts], noise(40, 4)]).numpy(), histogram=False).rows
    )
    assert rows[6][N] == 2


def test_take_starts_over():
    reducer = Reducer()
    reducer.add(1, torch.ones(3))
    assert rows_of(reducer)[1][N] == 3
    assert reducer.take() == []
    reducer.add(1, torch.ones(4))
    assert rows_of(reducer)[1][N] == 4


def test_tables_do_not_change_after_they_were_taken():
    reducer = Reducer()
    reducer.add(1, torch.ones(600))
    reducer.add_all("list", [2], [torch.ones(600)], histogram=True)
    tables = reducer.take()
    for _ in range(3):
        reducer.add(1, torch.full((600,), 9.0))
        reducer.add_all("list", [2], [torch.full((600,), 9.0)], histogram=True)
        reducer.take()
    keys, rows, index, hist = resolve_all(tables)
    assert rows[:, SUM].tolist() == [600.0, 600.0]
    assert keys[index].tolist() == [2]
    assert hist[0].argmax() == 48  # 2**0


def test_tensor_may_change_or_go_away_after_it_was_added():
    reducer = Reducer()
    x, y = torch.ones(3000), torch.ones(3000)
    reducer.add(1, x, histogram=True)
    reducer.add_all("list", [2], [y], histogram=True)
    x.fill_(7.0)
    y.fill_(7.0)
    freed = weakref.ref(x)
    del x
    gc.collect()
    assert freed() is None
    _, rows, _, hist = resolve_all(reducer.take())
    assert rows[:, SUM].tolist() == [3000.0, 3000.0]
    assert (hist.argmax(axis=1) == 48).all()


def test_same_tensor_under_two_names_has_equal_rows():
    reducer = Reducer()
    x = noise(2000)
    x[3] = float("nan")
    reducer.add(1, x, histogram=True)
    reducer.add(2, x, histogram=True)
    keys, rows, index, hist = resolve_all(reducer.take())
    assert sorted(keys.tolist()) == [1, 2]
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(hist[0], hist[1])
    assert index.tolist() == [0, 1]


def test_in_place_change_between_two_adds_is_noticed():
    reducer = Reducer()
    x = torch.ones(2000)
    reducer.add(1, x)
    x.mul_(3.0)
    reducer.add(2, x)
    x[0] = 100.0
    reducer.add(3, x)
    rows = rows_of(reducer)
    assert [rows[k][SUM] for k in (1, 2, 3)] == [2000.0, 6000.0, 6097.0]


def test_in_place_change_in_the_next_step_is_noticed_and_so_is_another_tensor_at_the_same_address():
    reducer = Reducer()
    for step in range(3):
        x = torch.full((5,), float(step))
        reducer.add(1, x)
        del x
        reducer.add(2, torch.full((5,), step + 0.5))
        rows = rows_of(reducer)
        assert (rows[1][SUM], rows[2][SUM]) == (5.0 * step, 5.0 * step + 2.5)


def test_a_view_of_the_last_tensor_is_not_taken_for_it():
    reducer = Reducer()
    x = torch.arange(10.0)
    reducer.add(1, x)
    reducer.add(2, x[:5])
    assert rows_of(reducer)[2][N] == 5


def test_same_input_gives_the_same_bits():
    def once() -> tuple[bytes, bytes]:
        reducer = Reducer()
        xs = [noise(size, size) for size in (3, 700, 140_000, 5)]
        xs[1][::3] = 0.0
        xs[1][4] = float("inf")
        for key, x in enumerate(xs):
            reducer.add(key, x, histogram=True)
        reducer.add_all("list", [10, 11, 12, 13], xs, histogram=True)
        _, rows, _, hist = resolve_all(reducer.take())
        return rows.tobytes(), hist.tobytes()

    assert once() == once()


def test_reused_memory_gives_the_same_bits_as_fresh_memory():
    xs = [noise(size, size) for size in (3, 700, 1025, 5)]
    used = Reducer()
    for fill in (float("nan"), 0.0, 1e30):
        for key, x in enumerate(xs):
            used.add(key, torch.full_like(x, fill))
        used.add_all("list", [10, 11, 12, 13], [torch.full_like(x, fill) for x in xs])
        used.take()
    fresh = Reducer()
    for reducer in (used, fresh):
        for key, x in enumerate(xs):
            reducer.add(key, x)
        reducer.add_all("list", [10, 11, 12, 13], xs)
    a, b = rows_of(used), rows_of(fresh)
    for key, row in a.items():
        np.testing.assert_array_equal(row, b[key])


def test_list_whose_shapes_dtypes_and_keys_change(ways):
    reducer = Reducer()
    for step in range(12):
        dtype = [torch.float32, torch.bfloat16, torch.float64][step % 3]
        xs = [(noise(step * 300 + 1, step) + 0.5).to(dtype), noise(7, step).view(7, 1), torch.ones(step + 2).double()]
        keys = [1, 2, 3 + step % 2]
        reducer.add_all("grad", keys, xs)
        rows = rows_of(reducer)
        assert sorted(rows) == sorted(keys)
        for key, x in zip(keys, xs, strict=True):
            ways.assert_same(rows[key], sketch(x.double().numpy(), histogram=False).rows)


def test_list_that_becomes_sparse_and_back():
    reducer = Reducer()
    dense = torch.tensor([[0.0, 2.0], [0.0, 3.0]])
    for x in (dense, dense.to_sparse(), dense):
        reducer.add_all("grad", [1], [x])
        row = rows_of(reducer)[1]
        assert (row[N], row[SUM], row[SUMSQ], row[MAX]) == (4, 5.0, pytest.approx(13.0), 3.0)


def test_inputs_are_never_modified():
    x = noise(3000)
    x[::5] = 0.0
    x[7] = float("nan")
    tensors = [x, x.to(torch.bfloat16), x.double().view(30, 100).t(), x.to_sparse(), x[::3], torch.complex(x, x)]
    before = [t.to_dense().clone() if t.is_sparse else t.clone() for t in tensors]
    versions = [t._version for t in tensors]
    reducer = Reducer()
    for key, t in enumerate(tensors):
        reducer.add(key, t, histogram=True)
    reducer.add_all("list", list(range(10, 16)), tensors, histogram=True)
    resolve_all(reducer.take())
    assert [t._version for t in tensors] == versions
    for t, old in zip(tensors, before, strict=True):
        torch.testing.assert_close(t.to_dense() if t.is_sparse else t, old, rtol=0, atol=0, equal_nan=True)


def test_tensors_that_require_grad_leave_no_graph_behind():
    weight = torch.nn.Parameter(noise(600))
    out = weight * 2
    reducer = Reducer()
    reducer.add(1, out, histogram=True)
    reducer.add_all("list", [2, 3], [weight, out], histogram=True)
    for table in reducer.take():
        assert table.samples is None or not table.samples.requires_grad
    assert not any(buffer.requires_grad for buffer in module.row_blocks.__globals__["scratch"].buffers.values())
    out.sum().backward()
    assert weight.grad.unique().tolist() == [2.0]


def test_random_generators_are_not_touched():
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002 - the global one is what this is about
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    reducer = Reducer()
    for _ in range(3):
        reducer.add(1, torch.arange(5000.0), histogram=True)
        reducer.add_all("list", [2], [torch.arange(5000.0)], histogram=True)
        resolve_all(reducer.take())
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002


def test_very_many_calls_of_one_module_are_combined_in_between(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PENDING", 10)
    reducer = Reducer()
    x = torch.ones(3)
    for call in range(35):
        reducer.add(call % 2, x + call)
        assert len(reducer._singles) <= 10
    rows = rows_of(reducer)
    assert rows[0][N] + rows[1][N] == 35 * 3
    assert rows[0][SUM] + rows[1][SUM] == 3 * sum(range(1, 36))


def test_shapes_that_change_in_every_step_do_not_pile_up_memory():
    reducer = Reducer()
    for step in range(200):
        for key in range(5):
            reducer.add(key, torch.ones(512 * (step + 1) + key))
        reducer.add_all("list", [9], [torch.ones(step + 1)])
        reducer.take()
    kept = sum(partials.num_rows for free in reducer._free.values() for partials in free)
    assert kept <= 5 * 201
    assert len(reducer._lists) == 1


def test_steps_that_add_nothing_keep_the_memory_of_those_that_do():
    reducer = Reducer()
    reducer.add(1, torch.ones(5000))
    reducer.take()
    kept = [id(p) for free in reducer._free.values() for p in free]
    reducer.take()
    reducer.add(1, torch.ones(5000))
    reducer.take()
    assert kept == [id(p) for free in reducer._free.values() for p in free]


def test_several_threads_add_at_once(ways):
    reducer = Reducer()
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait()
            for call in range(60):
                x = torch.full((700 + number,), float(number * 100 + call))
                x[0] = 0.0
                reducer.add(number, x, histogram=call % 7 == 0)
                reducer.add(10 + number, x)  # the container around it
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    taken = []
    while any(thread.is_alive() for thread in threads):
        taken += reducer.take()  # a step may end meanwhile
    for thread in threads:
        thread.join()
    taken += reducer.take()
    assert not errors
    keys, rows, _, _ = resolve_all(taken)
    rows = dict(zip(keys.tolist(), rows, strict=True))
    for number in range(4):
        xs = np.concatenate([[0.0] + [float(number * 100 + call)] * (699 + number) for call in range(60)])
        for key in (number, 10 + number):
            ways.assert_same(rows[key], sketch(xs, histogram=False).rows)


def test_histogram_only_where_asked():
    reducer = Reducer()
    reducer.add(1, torch.ones(5), histogram=True)
    reducer.add(2, torch.ones(5))
    reducer.add_all("a", [3], [torch.ones(5)], histogram=True)
    reducer.add_all("b", [4], [torch.ones(5)])
    keys, rows, index, hist = resolve_all(reducer.take())
    assert sorted(keys[index].tolist()) == [1, 3]
    assert hist.sum(axis=1).tolist() == [5.0, 5.0]
    assert rows[keys == 2][0][HIST_N] == 0
