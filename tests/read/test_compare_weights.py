"""Two sets of weights side by side: what changed, by how much, in which layer; other frameworks' layouts included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sonde.read.compare.weights import WeightComparison, compare_weights
from sonde.read.tensors.analysis.difference import Difference, difference
from sonde.read.tensors.lazy import LazyTensors, TensorSpec
from sonde.reduce.numpy import sketch
from sonde.run import Run, compare
from sonde.schema.records import Site, StatsRecord
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions

Keep = Callable[[Mapping[int, Mapping[str, np.ndarray]]], Run]


def lazy(**arrays: np.ndarray) -> LazyTensors:
    named = {name.replace("__", "."): array for name, array in arrays.items()}
    specs = {name: TensorSpec(array.shape, array.dtype.name) for name, array in named.items()}
    return LazyTensors("test", specs, named.__getitem__)


def row(found: WeightComparison, name: str) -> dict[str, Any]:
    (only,) = (row for row in found.tensors.to_pylist() if row["name"] == name)
    return only


def test_numbers_are_what_the_formulas_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonde.read.tensors.analysis.difference.ELEMENTS_AT_ONCE", 7)
    rng = np.random.default_rng(0)
    a = rng.normal(size=(5, 6)).astype(np.float32)
    b = a.copy()
    b[:2] += rng.normal(size=(2, 6)).astype(np.float32)
    found = difference(a, b)
    x, y = a.astype(float), b.astype(float)
    assert found.max_abs == pytest.approx(np.abs(y - x).max())
    assert found.relative == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x))
    assert found.cosine == pytest.approx((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y))
    assert found.changed_fraction == pytest.approx(12 / 30)


def test_not_finite_and_zero() -> None:
    found = difference(np.array([np.nan, np.inf, 0.0, 1.0]), np.array([np.nan, -np.inf, 0.0, np.nan]))
    assert (found.num_changed, found.nonfinite_a, found.nonfinite_b, found.max_abs) == (2, 2, 3, 0.0)
    assert difference(np.zeros(2), np.ones(2)).relative == np.inf
    assert difference(np.zeros(2), np.zeros(2)).relative == 0.0
    assert difference(np.zeros((0, 3)), np.zeros((0, 3))) == Difference()


def test_large_integers_are_not_rounded() -> None:
    a = np.array([2**60, 1])
    assert difference(a, a + np.array([1, 0])).num_changed == 1


def test_complex_numbers_count_once() -> None:
    found = difference(np.array([1 + 1j, 2]), np.array([1 + 2j, 2]))
    assert (found.num_changed, found.num_elements, found.max_abs) == (1, 2, 1.0)


def test_statuses_and_order() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 4)).astype(np.float32)
    half = np.round(w * 4) / 4
    a = lazy(x__same=w, x__small=w, y__big=w, y__shape=w, y__half=half.astype(np.float32), gone=w)
    b = lazy(
        x__same=w,
        x__small=w * 1.001,
        y__big=-w,
        y__shape=w[:2],
        y__half=half.astype(ml_dtypes.bfloat16),
        new=w,
    )
    found = compare_weights(a, b)
    assert {row["name"]: row["status"] for row in found.tensors.to_pylist()} == {
        "x.same": "same",
        "x.small": "changed",
        "y.big": "changed",
        "y.shape": "reshaped",
        "y.half": "retyped",
        "gone": "only_a",
        "new": "only_b",
    }
    assert found.tensors["name"].to_pylist()[:5] == ["gone", "new", "y.shape", "y.big", "x.small"]
    assert row(found, "y.big")["cosine"] == pytest.approx(-1.0)
    assert row(found, "x.small")["relative"] == pytest.approx(0.001, rel=1e-3)
    assert found.total["num_same"] == 1
    assert not found.is_same
    layers = {layer["layer"]: layer for layer in found.layers.to_pylist()}
    assert layers["x"]["num_tensors"] == 2
    assert layers["x"]["num_changed"] == 1
    assert layers["x"]["relative"] == pytest.approx(
        np.linalg.norm(w.astype(float) * 0.001) / np.linalg.norm(np.stack([w, w]).astype(float)), rel=1e-3
    )


def test_same_is_same_and_names_of_wrappers_do_not_matter() -> None:
    w = np.ones((2, 2), np.float32)
    assert compare_weights(lazy(fc__weight=w), lazy(fc__weight=w)).is_same
    wrapped = {"module._orig_mod.fc.weight": w}
    assert compare_weights(lazy(fc__weight=w), lazy(**wrapped)).is_same


def test_keras_weights_lie_as_torchs_do() -> None:
    rng = np.random.default_rng(0)
    conv, fc, bias = rng.normal(size=(8, 3, 3, 3)), rng.normal(size=(5, 8)), rng.normal(size=5)
    a = lazy(**{"conv.weight": conv, "fc.weight": fc, "fc.bias": bias})
    keras = {
        "conv2d/kernel": conv.transpose(2, 3, 1, 0).copy(),
        "dense/kernel": fc.T.copy(),
        "dense/bias": bias + 1e-3,
    }
    b = LazyTensors("keras", {k: TensorSpec(v.shape, v.dtype.name) for k, v in keras.items()}, keras.__getitem__)
    found = compare_weights(a, b)
    assert found.frameworks == ("torch", "keras")
    assert row(found, "conv.weight")["status"] == row(found, "fc.weight")["status"] == "same"
    assert row(found, "conv.weight")["layout"] == "transpose 3 2 0 1"
    turned = row(compare_weights(b, a), "conv2d.weight")
    assert (turned["status"], turned["layout_a"], turned["layout"]) == ("same", "transpose 3 2 0 1", None)
    assert row(found, "conv.weight")["name_b"] == "conv2d/kernel"
    assert row(found, "fc.bias")["max_abs"] == pytest.approx(1e-3)
    assert row(found, "fc.bias")["matched_by"] == "order"


def test_progress_is_reported() -> None:
    told: list[tuple[int, int]] = []
    compare_weights(lazy(a=np.ones(1), b=np.ones(1)), lazy(a=np.ones(1)), lambda *news: told.append(news))
    assert told == [(1, 2), (2, 2)]


def test_files_snapshots_and_runs(keep_snapshots: Keep, tmp_path: Path) -> None:
    w = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    run = keep_snapshots({0: {"param/fc.weight": w, "grad/fc.weight": w * 3}, 10: {"param/fc.weight": w * 2}})
    np.savez(tmp_path / "a.npz", **{"fc.weight": w})
    for other, relative in ((f"{run.path}@0", 0.0), (f"{run.path}@latest", 1.0), (f"{run.path}@-2", 0.0), (run, 1.0)):
        found = compare(tmp_path / "a.npz", other)
        assert isinstance(found, WeightComparison)
        assert row(found, "fc.weight")["relative"] == pytest.approx(relative)
    assert row(compare(f"{run.path}@0", f"{run.path}@10"), "fc.weight")["cosine"] == pytest.approx(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'no tensors of kind "grad"\. It has param'):
        compare(f"{run.path}@0", f"{run.path}@10", kind="grad")


def write_model(dir: Path, weights: Mapping[str, np.ndarray], diverge_at: int | None = None) -> Run:
    """A run that recorded the statistics of these parameters."""
    path = create_run(dir, project="p", name=None, config={}, tags=(), notes="")
    writer = Writer(path, WriterOptions())
    sites = [Site(kind="param", name=name, shape=array.shape, dtype="float64") for name, array in weights.items()]
    ids = np.array([writer.site_id(site) for site in sites], np.int32)
    for step in range(4):
        shift = 0.5 if diverge_at is not None and step >= diverge_at else 0.0
        made = [sketch(array * (1 + step) + shift) for array in weights.values()]
        rows = np.array([one.rows for one in made])
        writer.put(StatsRecord.without_hist(step, 1.0, ids, rows), rows.nbytes, step=step)
        writer.set_step(step)
    writer.close("finished")
    return Run(path)


def test_runs_of_two_frameworks_are_compared_under_one_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    conv, fc, bias = rng.normal(size=(8, 3, 3, 3)), rng.normal(size=(5, 8)), rng.normal(size=5)
    torch_run = write_model(tmp_path / "a", {"conv.weight": conv, "fc.weight": fc, "fc.bias": bias})
    keras = {"conv2d.kernel": conv.transpose(2, 3, 1, 0), "dense.kernel": fc.T, "dense.bias": bias}
    same = compare(torch_run, write_model(tmp_path / "b", keras))
    assert (same.only_a, same.only_b, same.first_divergence) == ((), (), None)
    assert same.divergence.num_rows == 3
    apart = compare(torch_run, write_model(tmp_path / "c", keras, diverge_at=2)).first_divergence
    assert apart is not None
    assert (apart.step, apart.kind, apart.site) == (2, "param", "conv.weight")
