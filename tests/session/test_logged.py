"""What `log`, `tap` and `batch` are given: good values always arrive, a bad one costs itself and one warning."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from sonde.errors import UsageError


class Broken:
    """Fails at whatever is done with it."""

    def __float__(self) -> float:
        raise RuntimeError("a number of mine")

    def __repr__(self) -> str:
        raise RuntimeError("no words either")


class Twice(Mapping[str, Any]):
    """A mapping that ends in an error."""

    def __init__(self, good: dict[str, Any]) -> None:
        self.good = good

    def __getitem__(self, key: str) -> Any:
        return self.good[key]

    def __iter__(self) -> Iterator[str]:
        yield from self.good
        raise OSError("the rest is gone")

    def __len__(self) -> int:
        return len(self.good)


def contains_itself() -> dict[str, Any]:
    made: dict[str, Any] = {}
    made["again"] = made
    return made


def list_in_itself() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


GOOD: dict[str, Callable[[], tuple[Any, float]]] = {
    "float": lambda: (0.5, 0.5),
    "int": lambda: (3, 3.0),
    "bool": lambda: (True, 1.0),
    "huge int": lambda: (10**400, math.inf),
    "nan": lambda: (math.nan, math.nan),
    "inf": lambda: (-math.inf, -math.inf),
    "Decimal": lambda: (Decimal("0.25"), 0.25),
    "Decimal nan": lambda: (Decimal("nan"), math.nan),
    "Fraction": lambda: (Fraction(1, 8), 0.125),
    "list of one": lambda: ([[0.75]], 0.75),
    "tuple of a tensor": lambda: ((torch.tensor([1.5]),), 1.5),
    "numpy float16": lambda: (np.float16(1.5), 1.5),
    "numpy longdouble": lambda: (np.longdouble(2.5), 2.5),
    "numpy int8": lambda: (np.int8(-3), -3.0),
    "numpy uint64": lambda: (np.uint64(2**40), float(2**40)),
    "numpy bool": lambda: (np.bool_(True), 1.0),
    "array of no dimension": lambda: (np.array(4.0), 4.0),
    "array of one": lambda: (np.array([5.0]), 5.0),
    "array of three dimensions": lambda: (np.full((1, 1, 1), 6, np.int16), 6.0),
    "array with nan": lambda: (np.array([np.nan], np.float32), math.nan),
    "array of objects": lambda: (np.array([Decimal(7)], object), 7.0),
    "unmasked array": lambda: (np.ma.array([8.0], mask=[False]), 8.0),
    "tensor": lambda: (torch.tensor(1.25), 1.25),
    "tensor of one": lambda: (torch.tensor([[2.25]]), 2.25),
    "tensor with grad": lambda: (torch.tensor([3.25], requires_grad=True) * 1, 3.25),
    "parameter": lambda: (torch.nn.Parameter(torch.tensor(4.25)), 4.25),
    "bool tensor": lambda: (torch.tensor(True), 1.0),
    "int tensor": lambda: (torch.tensor([7], dtype=torch.int16), 7.0),
    "uint64 tensor": lambda: (torch.tensor(9, dtype=torch.uint64), 9.0),
    "bfloat16 tensor": lambda: (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
    "float8 tensor": lambda: (torch.tensor([0.5]).to(torch.float8_e4m3fn), 0.5),
    "float8 tensor, other": lambda: (torch.tensor([2.0]).to(torch.float8_e5m2), 2.0),
    "quantized tensor": lambda: (torch.quantize_per_tensor(torch.tensor([0.5]), 0.25, 0, torch.qint8), 0.5),
    "sparse tensor": lambda: (torch.tensor([[2.0]]).to_sparse(), 2.0),
    "sparse zero": lambda: (torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (1,)), 0.0),
    "sparse rows": lambda: (torch.tensor([[3.0]]).to_sparse_csr(), 3.0),
    "strided view": lambda: (torch.arange(9.0).reshape(3, 3).t()[1:2, 2:], 7.0),
    "inference tensor": lambda: (_in_inference_mode(), 2.0),
    "conjugate": lambda: (torch.tensor([1 + 2j]).conj().imag, -2.0),
    "nested": lambda: ({"a": {"b": np.array([1.0])}}, 1.0),
    "nested, ordered": lambda: (OrderedDict(x=UserDict(y=2)), 2.0),
}
BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "high",
    "number as text": lambda: "0.5",
    "bytes": lambda: b"1",
    "complex": lambda: 1 + 2j,
    "numpy complex": lambda: np.complex64(1j),
    "complex array": lambda: np.array([1j]),
    "complex tensor": lambda: torch.tensor(1 + 2j),
    "meta tensor": lambda: torch.ones(1, device="meta"),
    "two values": lambda: torch.ones(2),
    "no values": lambda: np.zeros((0, 3)),
    "list": lambda: [1, 2],
    "empty list": list,
    "list in itself": list_in_itself,
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
    "set": lambda: {1.0},
    "function": lambda: print,
    "class": lambda: float,
    "module": lambda: torch.nn.Linear(1, 1),
    "date": lambda: np.datetime64("2020-01-01"),
    "duration": lambda: np.timedelta64(1, "s"),
    "other duration": lambda: timedelta(seconds=1),
    "texts": lambda: np.array(["a"]),
    "record": lambda: np.zeros(1, dtype=[("x", "f4")]),
    "void": lambda: np.void(b"abcd"),
    "masked": lambda: np.ma.array([8.0], mask=[True]),
    "masked constant": lambda: np.ma.masked,
    "signalling nan": lambda: Decimal("sNaN"),
    "broken": Broken,
    "mapping in itself": contains_itself,
    "namespace": lambda: types.SimpleNamespace(x=1),
}


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(1) * 2


@pytest.fixture
def session(begin: Any) -> Any:
    return begin()


def left_out(warning: str) -> str:
    """The quoted name in `log() did not record "name": why`."""
    assert warning.startswith('log() did not record "')
    return warning.split(" ")[4].rstrip(":")


def rows(run: Any) -> dict[str, float]:
    return {row["name"]: row["value"] for row in run.scalars().to_pylist()}


def same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


NO_WARNINGS = pytest.mark.filterwarnings("ignore:Sparse", "ignore:torch.quantize", "ignore:The PyTorch API of nested")


@NO_WARNINGS
def test_every_kind_of_number_is_recorded(session: Any, reopen: Any, capfd: Any) -> None:
    for step, (kind, make) in enumerate(GOOD.items()):
        session.log({kind: make()[0], "other": step}, step=step)
    run = reopen()
    found = run.scalars().to_pylist()
    for step, make in enumerate(GOOD.values()):
        numbers = {row["name"]: row["value"] for row in found if row["step"] == step}
        assert numbers.pop("other") == step
        (number,) = numbers.values()
        assert same(number, make()[1]), numbers
    assert capfd.readouterr().err == ""
    assert run.warnings == []


@NO_WARNINGS
def test_an_invalid_number_costs_itself_and_one_warning(session: Any, reopen: Any, capfd: Any) -> None:
    for step in range(2):
        for kind, make in BAD.items():
            session.log({f"before {kind}": 1.5, kind: make(), f"after {kind}": torch.tensor([2.5])}, step=step)
    assert (session.recording.breaker.num_errors, session.recording.breaker.is_open) == (0, False)
    run = reopen()
    assert set(rows(run)) == {f"{when} {kind}" for kind in BAD for when in ("before", "after")}
    assert run.scalars().num_rows == 2 * 2 * len(BAD)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == len(run.warnings) == len(BAD)
    for kind, line, reason in zip(BAD, told, run.warnings, strict=True):
        assert line == f"sonde: warning: {reason}"
        assert reason.startswith(f'log() did not record "{kind}')
        assert "disk" not in reason


@NO_WARNINGS
def test_good_values_arrive_whatever_is_logged_with_them(session: Any, reopen: Any) -> None:
    draw = random.Random(0)
    wanted = []
    for step in range(300):
        values = {f"bad {place}": BAD[draw.choice(list(BAD))]() for place in range(draw.randrange(5))}
        for place in range(draw.randrange(5)):
            value, expected = GOOD[draw.choice(list(GOOD))]()
            values[f"good {place}"] = value
            wanted.append((step, expected))
        names = list(values)
        draw.shuffle(names)
        session.log({name: values[name] for name in names}, step=step)
    assert session.recording.breaker.num_errors == 0
    found = [(row["step"], row["value"]) for row in reopen().scalars().to_pylist()]
    assert sorted(map(str, found)) == sorted(map(str, wanted))


def test_a_mapping_that_fails_costs_what_comes_after(session: Any, reopen: Any) -> None:
    session.log(Twice({"a": 1, "b": 2}))
    run = reopen()
    assert rows(run) == {"a": 1.0, "b": 2.0}
    assert len(run.warnings) == 1
    assert "the rest is gone" in run.warnings[0]


def test_names_of_any_kind_are_kept_apart(session: Any, reopen: Any) -> None:
    odd = {
        1: 1,
        None: 2,
        ("a", "b"): 3,
        "": 4,
        "a b\n\t": 5,
        "é\ud800\x00": 6,
        "x" * 5000: 7,
        "%00": 8,
        2.5: 9,
        b"b": 10,
    }
    session.log(odd)
    run = reopen()
    assert sorted(rows(run).values()) == [float(n) for n in range(1, 11)]
    assert run.warnings == []


def test_a_name_logged_twice_keeps_the_last_value_and_warns(session: Any, reopen: Any) -> None:
    session.log({"a/b": 1.0, "a": {"b": 2.0}, 1: 3.0, "1": 4.0})
    run = reopen()
    assert rows(run) == {"a/b": 2.0, "1": 4.0}
    assert len([warning for warning in run.warnings if "twice in one call" in warning]) == 2


def test_very_many_names_in_one_call_arrive(session: Any, reopen: Any) -> None:
    session.log({f"metric/{number}": number for number in range(20_000)})
    run = reopen()
    assert run.scalars().num_rows == 20_000
    assert run.warnings == []


@pytest.mark.parametrize("step", [np.array([7]), np.int32(7), torch.tensor([7]), 7.0, "7", np.array(7.0)])
def test_a_step_may_be_any_whole_number(step: Any, session: Any, reopen: Any) -> None:
    session.log({"loss": 1.0}, step=step)
    assert reopen().scalars("loss").column("step").to_pylist() == [7]


def test_a_step_between_two_is_not_rounded(session: Any, reopen: Any) -> None:
    session.log({"loss": 1.0}, step=2.5)
    run = reopen()
    assert run.scalars("loss").num_rows == 0
    assert "whole number as step=, not 2.5" in run.warnings[0]


def test_values_are_taken_when_they_are_logged(session: Any, reopen: Any) -> None:
    tensor, array = torch.tensor([1.0]), np.array([2.0])
    session.log({"tensor": tensor, "array": array})
    tensor.fill_(9.0), array.fill(9.0)
    assert rows(reopen()) == {"tensor": 1.0, "array": 2.0}


def test_the_users_own_modes_do_not_see_what_is_logged(session: Any, reopen: Any) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Count(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num += 1
            return func(*args, **(kwargs or {}))

    loss = torch.ones(1, dtype=torch.bfloat16)
    with FlopCounterMode(display=False), Count() as count:
        session.log({"loss": loss})
    assert count.num == 0
    assert rows(reopen()) == {"loss": 1.0}


def test_tensors_inside_a_transform_are_left_out(session: Any, reopen: Any) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        session.log({"inside": x, "other": 1.0})
        return x * 2

    torch.vmap(loss)(torch.ones(3))
    run = reopen()
    assert rows(run) == {"other": 1.0}
    assert "vmap" in run.warnings[0]


def test_a_fake_tensor_is_left_out(session: Any, reopen: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(1)
    session.log({"fake": fake, "other": 1.0})
    run = reopen()
    assert rows(run) == {"other": 1.0}
    assert "no value" in run.warnings[0]


class Confusing(list[Any]):
    """A list that fails when it is read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("not to be read")


ODD_ARRAYS: dict[str, Callable[[], Any]] = {
    "ragged": lambda: [[1], [1, 2]],
    "tensors of two lengths": lambda: [torch.ones(2), torch.ones(3)],
    "with grad, in a list": lambda: [torch.ones(2, requires_grad=True)],
    "texts": lambda: ["a", "b"],
    "objects": lambda: [Broken(), Broken()],
    "iterator": lambda: iter([1, 2]),
    "set": lambda: {1, 2},
    "None": lambda: None,
    "meta": lambda: torch.ones(2, device="meta"),
    "list in itself": list_in_itself,
}


def test_a_tap_of_what_cannot_be_read_costs_itself_and_one_warning(session: Any, reopen: Any, capfd: Any) -> None:
    for _ in range(2):
        for kind, make in ODD_ARRAYS.items():
            session.tap(kind, make())
            session.tap("good", torch.full((3,), 2.0))
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    assert run.sites("custom/*").column("site").to_pylist() == ["good"]
    assert len(capfd.readouterr().err.splitlines()) == len(run.warnings) == len(ODD_ARRAYS)
    assert all("is not recorded" in warning for warning in run.warnings)


@NO_WARNINGS
def test_taps_of_any_array_are_recorded(session: Any, reopen: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    session.tap("masked", np.ma.masked_greater(np.array([3.0, 4.0, 900.0]), 5))
    session.tap("bfloat16", np.array([3.0, 4.0], ml_dtypes.bfloat16))
    session.tap("nested", torch.nested.nested_tensor([torch.tensor([3.0]), torch.tensor([4.0, 0.0])]))
    session.tap("list", [3, 4])
    session.tap(5, np.array([3.0, 4.0]))
    run = reopen()
    found = {row["site"]: row["value"] for row in run.stats("custom/*/norm").to_pylist()}
    assert found == dict.fromkeys(["masked", "bfloat16", "nested", "list", "5"], 5.0)
    assert run.warnings == []


@NO_WARNINGS
def test_unreadable_parts_of_a_batch_are_reported_and_the_others_recorded(session: Any, reopen: Any) -> None:
    session.watch(torch.nn.Linear(1, 1))
    for kind, make in ODD_ARRAYS.items():
        session.batch((torch.ones(2), make()), make())
        session.batch(torch.ones(2), ids=make())
        session.batch({"x": torch.ones(2), kind: make()}, ids=Confusing([1]))
    session.batch(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), torch.tensor([1, 1]))
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    assert run.stats("custom/batch.0/n").num_rows > 0
    assert run.scalars("data/batch/label_purity").column("value").to_pylist()[-1] == 1.0
    assert any("not to be read" in warning for warning in run.warnings)


def test_ids_that_can_be_read_only_once_are_left_to_the_loop(session: Any, reopen: Any) -> None:
    ids = iter([1, 2, 3])
    session.batch(torch.ones(3), ids=ids)
    assert list(ids) == [1, 2, 3]
    assert "Pass a list" in reopen().warnings[0]


@dataclasses.dataclass
class Options:
    lr: float = 0.1
    inner: Any = None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"config": argparse.Namespace(lr=1)}, {"lr": 1}),
        ({"config": Options(inner=Options())}, {"lr": 0.1, "inner": {"lr": 0.1, "inner": None}}),
        ({"config": UserDict(a=UserDict(b=1))}, {"a": {"b": 1}}),
        ({"config": [("a", 1)]}, {"a": 1}),
        ({"config": {"a": Broken()}}, {"a": "<Broken: RuntimeError in str()>"}),
        ({"tags": "baseline"}, ("baseline",)),
        ({"tags": None}, ()),
        ({"tags": {"a"}}, ("a",)),
        ({"tags": 5}, ("5",)),
        ({"notes": None}, ""),
        ({"notes": 5}, "5"),
        ({"name": 5}, "5"),
    ],
)
def test_a_run_is_described_by_values_of_any_kind(
    given: dict[str, Any], expected: Any, begin: Any, reopen: Any
) -> None:
    begin(**given)
    (field,) = given
    assert getattr(reopen(), field) == expected


@pytest.mark.parametrize("config", [5, "config.yaml", [1, 2]])
def test_an_invalid_config_is_refused_with_what_is_accepted(config: Any, begin: Any) -> None:
    with pytest.raises(UsageError, match="config= must be a mapping"):
        begin(config=config)


@pytest.mark.slow
def test_numbers_of_jax_are_recorded_and_not_waited_for(session: Any, reopen: Any) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    donated = jnp.ones((1,)) * 3
    session.log(
        {
            "plain": jnp.float32(1.5),
            "one": jnp.ones((1, 1)),
            "bfloat16": jnp.asarray(2.5, jnp.bfloat16),
            "bool": jnp.asarray(True),
            "donated": donated,
            "two": jnp.ones(2),
            "complex": jnp.asarray(1j),
            "key": jax.random.key(0),
        }
    )
    donated.delete()

    @jax.jit
    def traced(x: Any) -> Any:
        session.log({"traced": x, "inside": 1.0})
        return x

    traced(jnp.ones(()))
    run = reopen()
    assert rows(run) == {"plain": 1.5, "one": 1.0, "bfloat16": 2.5, "bool": 1.0, "donated": 3.0, "inside": 1.0}
    assert {left_out(warning) for warning in run.warnings} == {'"two"', '"traced"', '"complex"', '"key"'}


@pytest.mark.slow
def test_numbers_of_tensorflow_are_recorded(session: Any, reopen: Any) -> None:
    tf = pytest.importorskip("tensorflow")
    variable = tf.Variable([2.0])
    session.log({"plain": tf.constant(1.5), "one": tf.ones((1, 1)), "variable": variable, "two": tf.ones(2)})
    session.log({"bfloat16": tf.constant(0.5, tf.bfloat16), "text": tf.constant("a"), "complex": tf.constant(1j)})
    variable.assign([9.0])

    @tf.function
    def traced(x: Any) -> Any:
        session.log({"traced": x, "inside": 1.0})
        return x

    traced(tf.constant(1.0))
    run = reopen()
    assert rows(run) == {"plain": 1.5, "one": 1.0, "variable": 2.0, "bfloat16": 0.5, "inside": 1.0}
    assert {left_out(warning) for warning in run.warnings} == {'"two"', '"text"', '"complex"', '"traced"'}


@pytest.mark.slow
def test_numbers_of_pandas_and_torchmetrics_are_recorded(session: Any, reopen: Any) -> None:
    pandas = pytest.importorskip("pandas")
    torchmetrics = pytest.importorskip("torchmetrics")
    metric = torchmetrics.MeanMetric()
    metric.update(3.0)
    session.log({"series": pandas.Series([1.5]), "extension": pandas.array([2.5], dtype="Float64"), "NA": pandas.NA})
    session.log({"frame": pandas.DataFrame({"a": [1.0]}), "time": pandas.Timestamp(0), "metric": metric})
    session.log({"computed": metric.compute()})
    run = reopen()
    assert rows(run) == {"series": 1.5, "extension": 2.5, "computed": 3.0}
    assert [left_out(warning) for warning in run.warnings] == ['"NA"', '"frame"', '"time"', '"metric"']
    assert "compute()" in run.warnings[-1]


@pytest.mark.slow
def test_a_distributed_tensor_is_recorded_where_it_is_whole(session: Any, reopen: Any, tmp_path: Any) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        made = {
            name: DTensor.from_local(torch.tensor([2.5]), mesh, [placement])
            for name, placement in {"whole": Replicate(), "split": Shard(0), "partial": Partial()}.items()
        }
        session.log(made)
    finally:
        distributed.destroy_process_group()
    run = reopen()
    assert rows(run) == {"whole": 2.5}
    assert all("full_tensor()" in warning for warning in run.warnings)
    assert len(run.warnings) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_on_a_gpu_are_recorded_and_not_waited_for(session: Any, reopen: Any) -> None:
    def on_gpu(value: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, device="cuda")

    changed = on_gpu([4.5])
    values = {
        "plain": on_gpu(1.5),
        "bfloat16": on_gpu([2.5], torch.bfloat16),
        "float8": on_gpu([0.5]).to(torch.float8_e4m3fn),
        "int": on_gpu([[7]], torch.int64),
        "list": [on_gpu(3.5)],
        "changed": changed,
        "host": torch.tensor(6.5),
        "sparse": on_gpu([[8.5]]).to_sparse(),
        "complex": on_gpu(1j, torch.complex64),
        "two": on_gpu([1.0, 2.0]),
    }
    torch.cuda.synchronize()
    with torch.cuda.device(0):
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.log({name: value for name, value in values.items() if name != "sparse"})
        finally:
            torch.cuda.set_sync_debug_mode("default")
    session.log({"sparse": values["sparse"]})
    changed.fill_(9.0)
    run = reopen()
    assert rows(run) == {
        "plain": 1.5, "bfloat16": 2.5, "float8": 0.5, "int": 7.0, "list": 3.5, "changed": 4.5,
        "host": 6.5, "sparse": 8.5,
    }  # fmt: skip
    assert [left_out(warning) for warning in run.warnings] == ['"complex"', '"two"']
