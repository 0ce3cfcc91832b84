"""The native kernel: the numbers of the specification, the same bits always, and nothing read that is not there."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import multiprocessing
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sonde.reduce.cpu import native
from sonde.reduce.cpu.native import CODES, NUM_SUMS, Act, Addresses, Library
from sonde.reduce.lists import TensorList
from sonde.reduce.numpy import sketch
from sonde.reduce.optimizer_pass import OptimizerPass
from sonde.reduce.torch import Reducer, resolve_all
from sonde.schema.sketch import FIELDS, INF, MAX, MIN, NAN, SUM, ZERO, N

SEGMENT = 32768
SIZES = [0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + 17]
DTYPES = list(CODES)
SPECIAL = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-44, -1e-40, 3.4e38, -3.4e38, 6e-8, 65504.0]
SOURCE = Path(native.__file__).with_name("native.c")


def noise(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[::7] = 0.0
    return x.to(dtype)


def work(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def bits(tensor: Tensor) -> bytes:
    """With every NaN the same NaN."""
    return torch.where(tensor.isnan(), torch.nan, tensor).numpy().tobytes()


def each_act(kernel: Library, source: Tensor, before: Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All that can be done with one tensor: the rows found and wanted. What is kept is torch's to the bit."""
    wide = source.to(before.dtype)
    for act in Act:
        kept = before.clone()
        rows = Addresses(kernel, [source]).rows([source], [kept], act)
        seen = wide if act <= Act.COPY else before - wide
        left = {Act.COPY: wide, Act.SUBTRACT_INTO: before - wide}.get(act, before)
        assert bits(kept) == bits(left), act
        yield rows[0], sketch(seen.double().numpy(), histogram=False).rows


def test_it_fills_the_first_fields_of_a_row():
    assert FIELDS[:NUM_SUMS] == ("n", "nan", "inf", "zero", "sum", "sumsq", "sumabs", "min", "max")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_around_lanes_chains_and_segments(kernel, ways, dtype, size):
    before = noise(size, work(dtype), 1)
    for found, wanted in each_act(kernel, noise(size, dtype), before):
        ways.assert_same(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", SPECIAL, ids=str)
def test_special_values_at_the_edges(kernel, ways, dtype, special):
    for place in (0, 15, 16, 300, SEGMENT - 1, SEGMENT, SEGMENT + 19):
        x = noise(SEGMENT + 20, dtype)
        x[place] = special
        for found, wanted in each_act(kernel, x, noise(SEGMENT + 20, work(dtype), 1)):
            ways.assert_same(found, wanted, place)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Bit patterns of all sorts: a tensor, and what was kept before."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(0, 40) | st.integers(250, 600))
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    raw, kept = (
        torch.frombuffer(bytearray(generator.bytes(size * each.itemsize)), dtype=each)
        if size
        else torch.empty(0, dtype=each)
        for each in (dtype, work(dtype))
    )
    # Whether a sum overflows that float64 can hardly hold depends on the order of adding, which is not guaranteed.
    raw, kept = (torch.where(x.isfinite() & (x.double().abs() > 1e300), x * 1e-10, x) for x in (raw, kept))
    tame = noise(size, dtype, 3) * draw(st.sampled_from([1.0, 1e-30, 1e-3, 1e4]))
    source = draw(st.sampled_from([raw, tame.to(dtype)]))
    return source, draw(st.sampled_from([kept, noise(size, work(dtype), 5)]))


@given(pairs())
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_any_bits(kernel, ways, pair):
    for found, wanted in each_act(kernel, *pair):
        ways.assert_same(found, wanted)


@pytest.mark.parametrize("value", [3.4e38, -3.4e38, 1e-45])
def test_chains_of_the_largest_and_smallest_numbers(kernel, ways, value):
    x = torch.full((3000,), value)
    ways.assert_same(kernel.row(x), sketch(x.double().numpy(), histogram=False).rows)


def test_a_difference_may_overflow_and_is_counted_as_infinite(kernel):
    row = Addresses(kernel, [torch.empty(40)]).rows([torch.full((40,), -3e38)], [torch.full((40,), 3e38)], Act.SUBTRACT)
    assert (row[0, INF], row[0, N], row[0, SUM], row[0, MIN]) == (40, 40, 0, np.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_threads_or_on_the_time_of_day(kernel, monkeypatch, dtype):
    monkeypatch.setattr(native, "THREADED", 1)
    xs = [noise(size, dtype, size) for size in (5, 100_001, 3, 2 * SEGMENT, 70_000)]
    xs[1][77] = float("nan")
    found = set()
    for num_threads in (1, 2, 3, 2, 1):
        torch.set_num_threads(num_threads)
        try:
            found.add(Addresses(kernel, xs).rows(xs).tobytes())
        finally:
            torch.set_num_threads(1)
    assert len(found) == 1


def test_threads_are_torchs_own_and_only_for_much_work(kernel, monkeypatch):
    asked = []

    @ctypes.CFUNCTYPE(None, ctypes.CFUNCTYPE(None, ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(work: Any, shared: int, num_threads: int, flags: int) -> None:
        asked.append((num_threads, flags))
        for _ in range(num_threads):  # who comes late finds nothing left to do
            work(shared)

    x = noise(native.THREADED)
    alone = kernel.row(x).tobytes()
    monkeypatch.setattr(kernel, "_parallel", ctypes.cast(parallel, ctypes.c_void_p).value)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    kernel.row(x[1:])
    assert asked == []
    assert kernel.row(x).tobytes() == alone
    assert asked == [(3, 0)]
    monkeypatch.setattr(kernel, "_parallel", None)  # no OpenMP runtime is loaded
    assert kernel.row(x).tobytes() == alone


def test_tensors_at_odd_addresses(kernel, ways):
    memory = bytearray(4 * 2000 + 8)
    for offset in (0, 1, 2, 3):
        x = torch.frombuffer(memory, dtype=torch.float32, count=2000, offset=offset).copy_(noise(2000))
        view = noise(2001)[1:]
        for tensor in (x, view):
            for found, wanted in each_act(kernel, tensor, noise(2000, seed=4)):
                ways.assert_same(found, wanted, offset)


@pytest.mark.parametrize("form", ["channels_last", "transposed", "strided", "negated", "expanded", "subclass"])
def test_tensors_that_are_not_contiguous(kernel, ways, form):
    class Mine(Tensor):
        pass

    x = noise(8 * 6 * 4 * 4).view(8, 6, 4, 4)
    x = {
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(0, 3),
        "strided": lambda: x[..., 1],
        "negated": lambda: torch._neg_view(x),
        "expanded": lambda: x[:1].expand(5, 6, 4, 4),
        "subclass": lambda: x.as_subclass(Mine),
    }[form]()
    plain = x.as_subclass(Tensor).resolve_neg().contiguous()
    ways.assert_same(kernel.row(x), sketch(plain.double().numpy(), histogram=False).rows)
    before = noise(x.numel(), seed=2).view(x.shape)
    table = Addresses(kernel, [x, plain])
    for act in (Act.COPY, Act.SUBTRACT_INTO):
        kept = [before.clone(), before.clone()]
        rows = table.rows([x, plain], kept, act)
        assert torch.equal(*kept)
        ways.assert_same(rows[0], rows[1])


def test_a_tensor_without_memory_is_never_pointed_at(kernel):
    class Doubled(Tensor):
        """Has a shape and no storage, as quantized weights of other packages have."""

        @staticmethod
        def __new__(cls, inner: Tensor) -> Self:
            made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return args[0]
            return func(*[2 * a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))

    x = Doubled(torch.ones(30))
    kept = [torch.full((30,), 5.0)]
    rows = Addresses(kernel, [x]).rows([x], kept, Act.SUBTRACT_INTO)
    assert (kernel.row(x)[SUM], rows[0, SUM], kept[0].sum()) == (60.0, 90.0, 90.0)


def test_a_storage_that_was_given_back_is_an_error_and_not_the_end(kernel):
    x = torch.ones(30)
    x.untyped_storage().resize_(0)
    for read in (lambda: kernel.row(x), lambda: Addresses(kernel, [x]).rows([x])):
        with pytest.raises(ValueError, match="no memory"):
            read()


def test_a_tensor_that_has_become_another_is_never_read_beyond_its_end(kernel, ways):
    table = Addresses(kernel, [torch.empty(40_000)])
    halved = noise(40_000).to(torch.bfloat16)
    kept = [torch.ones(40_000)]
    ways.assert_same(table.rows([halved])[0], kernel.row(halved))
    ways.assert_same(table.rows([halved], kept, Act.SUBTRACT_INTO)[0], kernel.row(1 - halved.float()))
    assert torch.equal(kept[0], 1 - halved.float())
    with pytest.raises(ValueError, match="has 39999 now"):
        table.rows([torch.ones(39_999)])
    with pytest.raises(RuntimeError, match="must match"):
        table.rows([torch.ones(39_999)], kept, Act.SUBTRACT)
    with pytest.raises(ValueError, match="longer"):
        table.rows([])
    with pytest.raises(NotImplementedError, match="meta"):  # moved elsewhere
        table.rows([torch.ones(40_000, device="meta")], kept, Act.COPY)


def test_one_list_read_by_several_threads_at_once(kernel):
    lists = [[torch.full((size,), float(number)) for size in (5, 3 * SEGMENT, 700)] for number in range(4)]
    table = Addresses(kernel, lists[0])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda xs: [table.rows(xs)[:, SUM].tolist() for _ in range(20)], lists))
    assert found == [[[5.0 * n, 3.0 * SEGMENT * n, 700.0 * n]] * 20 for n in range(4)]


def test_only_what_is_kept_takes_memory_and_only_once(kernel):
    params = [torch.nn.Parameter(torch.arange(size)) for size in (700.0, 3.0)]
    reading, keeping = (TensorList([1, 2], params, 512, lambda *_: None, keep=keep) for keep in (False, True))
    for listed in (reading, keeping):
        listed.sketch(params)
    assert "held" not in vars(reading.parts[0])
    (part,) = keeping.parts
    places = [t.data_ptr() for t in part.in_order(None)]
    with torch.no_grad():
        params[0] -= 1.0
    part.subtract(params, is_read=False)
    assert torch.equal(part.in_order(None)[0], params[0] + 1.0)
    part.subtract(params, is_read=True)
    assert torch.equal(part.in_order(None)[0], torch.ones(700))
    keeping.sketch(params)
    assert [t.data_ptr() for t in part.in_order(None)] == places


def test_tensors_that_move_are_found_again(kernel):
    reducer = Reducer()
    for step in range(4):
        xs = [torch.full((600,), float(step)), torch.full((5,), float(-step))]
        reducer.add_all("grad", [1, 2], xs)
        _, rows, _, _ = resolve_all(reducer.take())
        assert sorted(rows[:, SUM].tolist()) == sorted([600.0 * step, -5.0 * step])


def test_update_of_parameters_of_several_dtypes(kernel, ways):
    params = [torch.nn.Parameter(noise(700, dtype)) for dtype in DTYPES]
    reducer = Reducer()
    optimizer_pass = OptimizerPass(reducer)
    optimizer_pass.before("p", range(4), params, sketch=True, keep=True)
    before = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p in params:
            p += 0.5
    optimizer_pass.after("p", range(10, 14), params)
    keys, rows, _, _ = resolve_all(reducer.take())
    rows = dict(zip(keys.tolist(), rows, strict=True))
    for key, (old, p) in enumerate(zip(before, params, strict=True)):
        update = p.detach().to(work(p.dtype)) - old.to(work(p.dtype))
        ways.assert_same(rows[key], sketch(old.double().numpy(), histogram=False).rows)
        ways.assert_same(rows[10 + key], sketch(update.double().numpy(), histogram=False).rows)


def _in_child(x: Tensor) -> list[float]:
    found = native.row(x)
    return [] if found is None else found[:NUM_SUMS].tolist()


def test_small_work_in_a_forked_child(kernel):
    x = noise(5000)
    torch.set_num_threads(2)  # a child has none of these threads, and must not wait for them
    try:
        kernel.row(noise(native.THREADED))
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.apply_async(_in_child, (x,)).get(timeout=60)
    finally:
        torch.set_num_threads(1)
    assert found == kernel.row(x)[:NUM_SUMS].tolist()


# ------------------------------------------------------------------------------------------------- loading and building


@pytest.fixture
def compiled(tmp_path):
    """Builds C text to a library, quickly: nothing of it is made fast."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def build(text: str) -> Path:
        (tmp_path / "kernel.c").write_text(text)
        command = ["cc", "-std=c11", "-O0", "-fPIC", "-shared", "-ffp-contract=off", "kernel.c", "-o", "kernel.so"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        return tmp_path / "kernel.so"

    return build


def test_bits_do_not_depend_on_what_the_compiler_made_of_it(kernel, compiled):
    plain = Library(compiled(SOURCE.read_text("utf-8")))
    xs = [noise(size, dtype, size) for dtype in DTYPES for size in (7, 300, SEGMENT + 300)]
    assert Addresses(plain, xs).rows(xs).tobytes() == Addresses(kernel, xs).rows(xs).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("zero[l] += value == 0", "zero[l] += value != 0"),
        ("all.inf++", "all.nan++"),
        ("high[l] = value > high[l]", "high[l] = value < high[l]"),
        ("if (act == SUBTRACT_INTO) /*", "if (0) /*"),
        ("value = load(FLOAT32, kept, i) - value", "value -= load(FLOAT32, kept, i)"),
        ("(uint32_t)bits << 16", "(uint32_t)bits << 15"),
        ("UPDATE -= (double)g", "UPDATE += (double)g"),
        ("floor > v ? floor : v", "floor < v ? floor : v"),
        ("MOMENT += (double)g", "MOMENT += (double)difference"),
        ("#define ABI 3", "#define ABI 4"),
    ],
)
def test_a_wrong_kernel_is_refused_with_one_warning(compiled, monkeypatch, capsys, right, wrong):
    text = SOURCE.read_text("utf-8")
    assert right in text
    monkeypatch.setattr(native, "FILE", compiled(text.replace(right, wrong)))
    assert native.kernel.__wrapped__() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("sonde: warning: the native CPU kernel does not work here; torch is used instead (")


@pytest.mark.parametrize("content", [b"", b"no library", None])
def test_a_missing_library_is_not_a_failure(tmp_path, monkeypatch, caplog, capsys, content):
    file = tmp_path / "kernel.so"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setattr(native, "FILE", file)
    with caplog.at_level(logging.DEBUG, "sonde"):
        assert native.kernel.__wrapped__() is None
    assert [record.levelno for record in caplog.records] == ([logging.DEBUG] if content is None else [])
    assert capsys.readouterr().err.count("sonde: warning:") == (content is not None)


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("SONDE_NATIVE", "0")
    assert native.kernel.__wrapped__() is None


def test_where_it_is_off_torch_finds_the_same_counts(kernel, monkeypatch):
    x = noise(5000)
    x[3] = float("nan")
    by_kernel = native.row(x)
    monkeypatch.setattr(native, "kernel", lambda: None)
    assert native.row(x) is None
    reducer = Reducer()
    reducer.add(1, x)
    _, rows, _, _ = resolve_all(reducer.take())
    fields = [N, NAN, INF, ZERO, MIN, MAX]
    assert rows[0, fields].tolist() == by_kernel[fields].tolist()


@pytest.fixture(scope="module")
def hatch_build() -> Any:
    """The build hook as a module."""
    spec = importlib.util.spec_from_file_location("sonde_hatch_build", Path(__file__).parents[2] / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path, hatch_build, monkeypatch):
    """A source tree with a kernel that is soon built."""
    source = tmp_path / hatch_build.KERNEL_SOURCE
    source.parent.mkdir(parents=True)
    source.write_text("const char sonde_native_stamp[] = SONDE_STAMP;\n")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(hatch_build.SKIP_KERNEL, raising=False)
    return tmp_path


def test_the_kernel_is_built_once_and_again_when_its_source_changed(checkout, hatch_build):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    said: list[str] = []
    built = checkout / hatch_build.KERNEL
    assert hatch_build.has_kernel(checkout, said.append)
    first = built.stat().st_ino, built.read_bytes()
    assert hatch_build.has_kernel(checkout, said.append)
    assert (built.stat().st_ino, built.read_bytes()) == first
    (checkout / hatch_build.KERNEL_SOURCE).write_text("const char sonde_native_stamp[] = SONDE_STAMP; int other;\n")
    assert hatch_build.has_kernel(checkout, said.append)
    assert built.read_bytes() != first[1]
    assert said == []
    assert sorted(path.name for path in built.parent.iterdir()) == ["_native.so", "native.c"]


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
def test_without_a_compiler_that_works_there_is_a_word_and_no_kernel(checkout, hatch_build, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    (checkout / hatch_build.KERNEL).write_bytes(b"an old one")
    said: list[str] = []
    assert not hatch_build.has_kernel(checkout, said.append)
    assert len(said) == 1
    assert compiler in said[0]
    assert not (checkout / hatch_build.KERNEL).exists()


def test_the_kernel_can_be_left_out(checkout, hatch_build, monkeypatch):
    monkeypatch.setenv("SONDE_SKIP_NATIVE", "1")
    assert not hatch_build.has_kernel(checkout, pytest.fail)
    assert not (checkout / hatch_build.KERNEL).exists()
