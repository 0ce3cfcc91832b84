"""One way to say "the same as the specification" for all of these tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

from sonde.reduce.cpu import native
from sonde.reduce.numpy import sketch
from sonde.reduce.torch import Reducer, resolve_all
from sonde.schema.sketch import HIST_N, INF, MAX, MIN, NAN, SUM, SUMABS, SUMSQ, ZERO, N, empty_hist
from sonde.schema.stats import Sketch

settings.register_profile("reduce", max_examples=int(os.environ.get("SONDE_TEST_EXAMPLES", "60")), deadline=None)
settings.load_profile("reduce")


def as_numpy(tensor: Tensor) -> np.ndarray:
    """The elements of a plain tensor as float64 (or complex128), by a way the reducer does not take."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.uint64 or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return tensor.numpy().astype(np.float64)
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).numpy()
    return tensor.to(torch.float64).numpy()


def assert_same(found: np.ndarray, wanted: np.ndarray, note: object = "") -> None:
    """Counts and extremes to the last bit, sums to 1e-6 of the sum of magnitudes, norms to 1e-6."""
    for field in (N, NAN, INF, ZERO, MIN, MAX):
        assert found[field] == wanted[field], (note, field, found, wanted)
    if not np.isfinite(wanted[[SUM, SUMABS, SUMSQ]]).all():
        # Sums that float64 cannot hold: they must say so too, rather than be some number.
        for field in (SUM, SUMABS, SUMSQ):
            same = found[field] == wanted[field] or (np.isnan(found[field]) and np.isnan(wanted[field]))
            assert same or np.isfinite(wanted[field]), (note, field, found, wanted)
        return
    assert abs(found[SUM] - wanted[SUM]) <= 1e-6 * wanted[SUMABS], (note, found, wanted)
    assert abs(found[SUMABS] - wanted[SUMABS]) <= 1e-6 * wanted[SUMABS], (note, found, wanted)
    assert abs(found[SUMSQ] - wanted[SUMSQ]) <= 2e-6 * wanted[SUMSQ], (note, found, wanted)


class Ways:
    """Each way a tensor can become a sketch, by name."""

    names = ("add", "add_all")
    assert_same = staticmethod(assert_same)
    as_numpy = staticmethod(as_numpy)

    def rows(self, way: str, tensors: Sequence[Tensor], **options: Any) -> dict[int, Sketch]:
        """key -> sketch, with keys counted from 0."""
        return self.resolved(self.reduced(Reducer(**options.pop("reducer", {})), way, tensors, **options))

    @staticmethod
    def reduced(reducer: Reducer, way: str, tensors: Sequence[Tensor], **options: Any) -> Reducer:
        if way == "add":
            for key, tensor in enumerate(tensors):
                reducer.add(key, tensor, **options)
        else:
            reducer.add_all("list", list(range(len(tensors))), tensors, **options)
        return reducer

    @staticmethod
    def resolved(reducer: Reducer) -> dict[int, Sketch]:
        keys, rows, index, hist = resolve_all(reducer.take())
        hists = dict(zip(index.tolist(), hist, strict=True))
        assert len(set(keys.tolist())) == len(keys)
        return {
            int(k): Sketch(row, hists.get(i, empty_hist())) for i, (k, row) in enumerate(zip(keys, rows, strict=True))
        }

    def check(self, tensors: Sequence[Tensor], arrays: Sequence[np.ndarray] | None = None, way: str = "") -> None:
        """These tensors, all at once and by every way, against the specification."""
        arrays = [as_numpy(t) for t in tensors] if arrays is None else arrays
        for name in [way] if way else self.names:
            found = self.rows(name, tensors)
            assert sorted(found) == list(range(len(tensors))), name
            for key, array in enumerate(arrays):
                wanted = sketch(array, histogram=False).rows
                assert_same(found[key].rows, wanted, (name, key, tuple(array.shape)))
                assert found[key].rows[HIST_N] == 0


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Small tensors on a busy machine: threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel() -> native.Library:
    found = native.kernel()
    if found is None:
        pytest.skip("the native kernel was not built (make web), or is turned off")
    return found


@pytest.fixture(scope="module", params=["native", "torch"])
def each_kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both ways of reading on the CPU: what holds for the one must hold for the other."""
    if request.param == "native":
        request.getfixturevalue("kernel")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "kernel", lambda: None)
        yield request.param


@pytest.fixture(scope="session")
def ways() -> Ways:
    return Ways()


@pytest.fixture(scope="session")
def check() -> Callable[..., None]:
    return Ways().check
