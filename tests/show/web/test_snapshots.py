"""Whole tensors as images: of each block the element of largest magnitude with its sign, and the spectrum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from big_run import Plan, big_run
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.show.web.tensor_image import MAX_SIDE, image_of
from sonde.write.tensors.store import open_store

SHAPES = {"param/layers.0.attn.q.weight": (64, 64), "param/bias": (10,), "act/image": (3, 8, 5), "param/scale": ()}


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    large = rng.normal(size=(1500, 900)).astype(np.float32)
    large[777, 333] = -1e6
    large[3, 3] = np.nan
    return {**made, "param/large": large}


@pytest.fixture(scope="module")
def shot(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray], open_pages: Any) -> Any:
    dir = tmp_path_factory.mktemp("runs")
    run = big_run(dir, Plan(num_tensors=8, num_steps=20, kinds=("param",)))
    store = open_store("zarr", run)
    host = {name: HostTensor(value, "float32", value.shape) for name, value in tensors.items()}
    store.write(Snapshot(step=10, time=1.5e9, reason="every(10)", tensors=host))
    store.close()
    page = open_pages(dir)
    page.api = f"/api/runs/{page.get('/api/runs')['runs'][0]['id']}/snapshots"
    return page


def test_list_and_contents(shot: Any, tensors: dict[str, np.ndarray]) -> None:
    answer = shot.get(shot.api)
    assert answer["problem"] == ""
    (row,) = answer["snapshots"]
    assert (row["step"], row["reason"], row["num_tensors"]) == (10, "every(10)", 5)
    entries = shot.get(f"{shot.api}/10")["tensors"]
    assert {entry["name"]: tuple(entry["shape"]) for entry in entries} == {n: t.shape for n, t in tensors.items()}
    linked = next(entry for entry in entries if entry["name"] == "param/layers.0.attn.q.weight")
    assert linked["i"] == 1


def _image(shot: Any, name: str) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    entries = shot.get(f"{shot.api}/10")["tensors"]
    n = next(entry["n"] for entry in entries if entry["name"] == name)
    header, buffers = shot.get(f"{shot.api}/10/{n}")
    return header, buffers["pixels"].reshape(header["height"], header["width"]), buffers["spectrum"]


@pytest.mark.parametrize("name", SHAPES)
def test_small_tensors_are_shown_as_they_are(shot: Any, tensors: dict[str, np.ndarray], name: str) -> None:
    header, pixels, spectrum = _image(shot, name)
    value = tensors[name]
    matrix = value.reshape(value.shape[0], -1) if value.ndim > 1 else value.reshape(1, -1)
    assert np.array_equal(pixels, matrix)
    assert header["rms"] == pytest.approx(np.sqrt(np.square(value.astype(np.float64)).mean()))
    expected = np.linalg.svd(matrix.astype(np.float64), compute_uv=False) if min(matrix.shape) > 1 else []
    assert np.allclose(spectrum, expected)


def test_an_outlier_keeps_its_sign_and_is_never_hidden(shot: Any) -> None:
    header, pixels, spectrum = _image(shot, "param/large")
    assert pixels.shape == (MAX_SIDE, MAX_SIDE)
    assert header["matrix"] == [1500, 900]
    assert np.nanmin(pixels) == -1e6
    assert np.isnan(pixels).sum() == header["num_nan"] == 1
    assert len(spectrum) == 0  # a matrix with a NaN has none


@pytest.mark.parametrize("path", ["/11", "/10/99", "/10/5", "/999999999"])
def test_what_is_not_there_is_not_found(shot: Any, path: str) -> None:
    shot.get(shot.api + path, 404)


def test_blocks_make_no_difference() -> None:
    rng = np.random.default_rng(1)
    value = rng.normal(size=(1301, 700))
    value[5, 5], value[1300, 699] = np.inf, -np.inf
    whole = image_of(lambda begin, end: value[begin:end], 1301, 700)
    import sonde.show.web.tensor_image as module

    before, module.BLOCK_ELEMENTS = module.BLOCK_ELEMENTS, 10_000
    try:
        blocks = image_of(lambda begin, end: value[begin:end], 1301, 700)
    finally:
        module.BLOCK_ELEMENTS = before
    assert np.array_equal(whole.pixels, blocks.pixels)
    assert (whole.low, whole.high, whole.num_inf) == (blocks.low, blocks.high, blocks.num_inf)
    for y, x in ((0, 0), (100, 300), (511, 511)):
        rows = slice(*(-(-k * 1301 // 512) for k in (y, y + 1)))
        columns = slice(*(-(-k * 700 // 512) for k in (x, x + 1)))
        block = value[rows, columns]
        assert abs(whole.pixels[y, x]) == np.float32(np.abs(block).max())
