"""Whatever mode the user's code is in, sketches are the same and the mode is left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sonde.reduce.cpu import rows as rows_module
from sonde.reduce.optimizer_pass import Moments, OptimizerPass
from sonde.reduce.torch import Reducer, resolve_all

pytestmark = pytest.mark.usefixtures("each_kernel")


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeesDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext,
    "default device meta": lambda: default_device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "deterministic algorithms": deterministic,
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function mode": SeesFunctions,
    "dispatch mode": SeesDispatch,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    x = torch.randn(3000, generator=generator, dtype=torch.float32, device="cpu")
    x[::9] = 0.0
    x[5] = float("nan")
    large = torch.randn(140_000, generator=generator, dtype=torch.float32, device="cpu")
    return [x, x.to(torch.bfloat16), x.double(), x.to(torch.int32), large, torch.complex(large, large), x.to_sparse()]


def everything(reducer: Reducer, xs: list[torch.Tensor]) -> bytes:
    """All the ways a step uses."""
    params = [p for p in xs[:3] if p.dtype.is_floating_point]
    keys = list(range(len(xs)))
    for key, x in zip(keys, xs, strict=True):
        reducer.add(key, x, histogram=True)
        reducer.add(100 + key, x)
    reducer.add_all("list", [10 + key for key in keys], xs, histogram=True)
    optimizer_pass = OptimizerPass(reducer)
    optimizer_pass.before("p", [20, 21, 22], params, sketch=True, keep=True, histogram=True)
    moments = Moments([p * 0.5 for p in params], [p * p for p in params], correction=0.5, floor=1e-16)
    optimizer_pass.after("p", [30, 31, 32], params, grads=params, moments=moments, histogram=True)
    keys, rows, index, hist = resolve_all(reducer.take())
    order = np.argsort(keys)
    return rows[order].tobytes() + np.sort(keys[index]).tobytes() + hist[np.argsort(keys[index])].tobytes()


@pytest.fixture(scope="module")
def expected(each_kernel) -> bytes:
    return everything(Reducer(), tensors())


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_surroundings_do_not_change_a_bit(name, expected):
    xs = tensors()
    with SURROUNDINGS[name]():
        assert everything(Reducer(), xs) == expected


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_memory_made_in_one_surrounding_serves_in_another(name, expected, monkeypatch):
    # Buffers are made once and kept: those of inference mode, or of a default device, must not fail later.
    monkeypatch.setattr(rows_module.scratch, "buffers", {})
    reducer = Reducer()
    with SURROUNDINGS[name]():
        everything(reducer, tensors() if name != "inference mode" else [x.clone() for x in tensors()])
    reducer.turn = 0
    assert everything(reducer, tensors()) == expected


def test_inference_tensors_can_be_sketched_again_and_again():
    with torch.inference_mode():
        x = torch.ones(700)
    reducer = Reducer()
    reducer.add(1, x)
    reducer.add(2, x)
    with torch.inference_mode():
        x.mul_(2)  # counts no version, so the change cannot be noticed by it
    reducer.add(3, x)
    keys, rows, _, _ = resolve_all(reducer.take())
    assert dict(zip(keys.tolist(), rows[:, 4].tolist(), strict=True)) == {1: 700.0, 2: 700.0, 3: 1400.0}


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_is_left_as_it_was(enabled):
    with torch.set_grad_enabled(enabled):
        everything(Reducer(), tensors())
        assert torch.is_grad_enabled() is enabled
        assert not torch.is_inference_mode_enabled()
