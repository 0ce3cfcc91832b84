"""`run.tensors.get`, `.snapshot`, `.snapshots`: what was kept comes back, and no more is read than was asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sonde.errors import MissingPackageError, UnknownNameError, UsageError
from sonde.read.tensors.stores import FolderTensorStore, read_file
from sonde.read.tensors.tensors import tensor_over_steps
from sonde.run import Run
from sonde.run import open as open_run
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.folder import create_run
from sonde.write.tensors.store import open_store
from sonde.write.writer import Writer, WriterOptions

STEPS = (0, 10, 20, 30)
Keep = Callable[[Mapping[int, Mapping[str, np.ndarray]]], Run]


def weights(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(4, 6)).astype(ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def run(keep_snapshots: Keep) -> Run:
    return keep_snapshots(
        {
            step: {
                "param/layers.0.weight": weights(step),
                "param/eight": np.arange(5, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
                "optim/step": np.array(float(step)),
                "act/fc": np.ones((step // 10 + 1, 3), np.float32),
            }
            for step in STEPS
        }
    )


def test_tensor_over_steps_has_dims_coords_and_metadata(run: Run) -> None:
    found = run.tensors.get("param/layers.0.weight")
    assert found.dims == ("step", "d0", "d1")
    assert found.step.values.tolist() == list(STEPS)
    assert found.attrs == {"kind": "param", "site": "layers.0.weight", "dtype": "bfloat16", "units": "1"}
    assert found.dtype == ml_dtypes.bfloat16


def test_values_are_bit_exact(run: Run) -> None:
    found = run.tensors.get("param/layers.0.weight")
    for step in STEPS:
        assert found.sel(step=step).values.tobytes() == weights(step).tobytes()
    assert run.tensors.get("param/eight").values[0].astype(float).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "index",
    [
        (0,),
        (-1,),
        (slice(1, 3),),
        (slice(None), 2),
        (slice(None), slice(1, 3), -1),
        (slice(None, None, -1), slice(None, None, 2)),
        (3, [0, 2]),
    ],
)
def test_indexing_is_numpys(index: tuple[Any, ...], run: Run) -> None:
    expected = np.stack([weights(step) for step in STEPS])[index]
    assert run.tensors.get("param/layers.0.weight")[index].values.tolist() == expected.tolist()


def test_scalar_tensor_over_time(run: Run) -> None:
    assert run.tensors.get("optim/step").values.tolist() == [float(step) for step in STEPS]


@pytest.mark.parametrize(("steps", "expected"), [(slice(10, 21), [10, 20]), (30, [30]), (slice(-1, None), [30])])
def test_steps_are_chosen_before_anything_is_read(steps: Any, expected: list[int], run: Run) -> None:
    assert run.tensors.get("param/layers.0.weight", steps=steps).step.values.tolist() == expected


def test_unknown_tensor_is_answered_with_the_nearest(run: Run) -> None:
    with pytest.raises(UsageError, match=r'a name starts with its kind, e\.g\. "param/layers\.0\.weight"'):
        run.tensors.get("layers.0.weight")
    with pytest.raises(UnknownNameError, match=r'Did you mean "param/layers\.0\.weight"'):
        run.tensors.get("param/layers.0.wieght")
    with pytest.raises(UsageError, match="at the requested steps"):
        run.tensors.get("param/eight", steps=range(1, 5))


def test_changing_shape_is_refused_with_what_to_do(run: Run) -> None:
    with pytest.raises(UsageError, match=r"4 different shapes .* run\.tensors\.snapshot"):
        run.tensors.get("act/fc")
    assert run.tensors.get("act/fc", steps=20).shape == (1, 3, 3)


def test_snapshot_is_a_mapping(run: Run) -> None:
    found = run.tensors.snapshot(20)
    assert set(found) == {"param/layers.0.weight", "param/eight", "optim/step", "act/fc"}
    assert found["param/layers.0.weight"].tobytes() == weights(20).tobytes()
    assert found.specs["act/fc"].shape == (3, 3)
    assert set(run.tensors.snapshot(20, "param/*")) == {"param/layers.0.weight", "param/eight"}


@pytest.mark.parametrize(("asked", "step"), [("latest", 30), (-1, 30), (-4, 0), (10, 10)])
def test_snapshot_is_named_in_three_ways(asked: int | str, step: int, run: Run) -> None:
    assert float(run.tensors.snapshot(asked)["optim/step"]) == step


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (12, r"no snapshot of step 12\. The closest is 10\. Snapshots exist at steps 0, 10, 20, 30"),
        (-5, "-4 is the first"),
        ("last", "latest"),
    ],
)
def test_snapshot_that_is_not_there(asked: int | str, message: str, run: Run) -> None:
    with pytest.raises(UsageError, match=message):
        run.tensors.snapshot(asked)


def test_run_without_snapshots_says_how_to_take_them(keep_snapshots: Keep) -> None:
    run = keep_snapshots({})
    assert run.tensors.snapshots().num_rows == 0
    with pytest.raises(UsageError, match=r"snapshots=sonde\.every\(500\)"):
        run.tensors.snapshot()


def test_table_of_snapshots(run: Run) -> None:
    table = run.tensors.snapshots()
    assert table["step"].to_pylist() == list(STEPS)
    assert table["num_tensors"].to_pylist() == [4] * 4
    assert table["bytes"][1].as_py() == 4 * 6 * 2 + 5 + 8 + 2 * 3 * 4
    assert table["reason"].to_pylist() == ["test"] * 4


@pytest.mark.slow
def test_table_knows_what_a_real_run_stored(tmp_path: Path) -> None:
    import torch

    import sonde

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.init(project="p", dir=tmp_path) as session:
        sonde.watch(model, optimizer, snapshots=sonde.every(2))
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        path = session.path
    run = open_run(path)
    table = run.tensors.snapshots()
    assert table.num_rows >= 2
    assert all(stored and stored > 0 for stored in table["stored_bytes"].to_pylist())
    assert run.tensors.snapshot("latest")["param/weight"].shape == (64, 64)
    assert run.tensors.get("param/weight").shape == (table.num_rows, 64, 64)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all pieces of tensors that are read."""
    sizes: list[int] = []

    def counting(path: Path, offset: int, size: int) -> bytes:
        found = read_file(path, offset, size)
        sizes.append(len(found))
        return found

    monkeypatch.setattr("sonde.read.tensors.stores.read_file", counting)
    return sizes


def test_large_tensor_is_read_in_chunks_and_only_where_asked(
    keep_snapshots: Keep, monkeypatch: pytest.MonkeyPatch, num_read: list[int]
) -> None:
    monkeypatch.setattr("sonde.read.tensors.tensors.LARGE", 2 << 20)
    monkeypatch.setattr("sonde.read.tensors.tensors.CHUNK", 1 << 20)
    large = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)  # 2 MiB
    run = keep_snapshots(
        {step: {"param/large": large + step, "param/other": large[:512]} for step in (0, 1)}, {"chunk_mib": 0.25}
    )
    found = tensor_over_steps(lambda: FolderTensorStore(run.path), "param/large")
    assert found.chunks is not None
    assert sum(num_read) < 10_000  # two documents
    rows = found.sel(step=1)[100:104].values
    assert rows.tolist() == (large + 1)[100:104].tolist()
    assert sum(num_read) < large.nbytes // 2 + (1 << 18)
    assert float(found.max().compute()) == (large + 1).max()


def test_one_layer_over_time_reads_little_of_the_rest(keep_snapshots: Keep, num_read: list[int]) -> None:
    rng = np.random.default_rng(0)
    layers = {f"param/layers.{i}.weight": rng.normal(size=(64, 1024)).astype(np.float32) for i in range(40)}
    run = keep_snapshots({step: {name: value + step for name, value in layers.items()} for step in range(4)})
    tensor_over_steps(lambda: FolderTensorStore(run.path), "param/layers.3.weight").load()
    assert sum(num_read) < 0.05 * 4 * sum(value.nbytes for value in layers.values())


def test_missing_package_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xarray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'sonde-ml\[tensors\]'"):
        run.tensors.get("param/eight")
    assert run.tensors.snapshot("latest")["param/eight"].shape == (5,)  # needs numpy only


@pytest.mark.slow
def test_versions_of_a_run_in_a_repository(tmp_path: Path) -> None:
    path = create_run(tmp_path, project="lake", name=None, config={}, tags=(), notes="")
    store: Any = open_store("icechunk", path)
    for step in STEPS:
        store.write(Snapshot(step, 1.0, "test", {"param/w": HostTensor.of(weights(step))}))
    store.tag("best", 10)
    store.close()
    Writer(path, WriterOptions()).close("finished")
    run = open_run(path)
    assert run.tensors.get("param/w").step.values.tolist() == list(STEPS)
    best = run.tensors.version(tag="best")
    assert best.get("param/w").step.values.tolist() == [0, 10]
    assert best.snapshot("latest")["param/w"].tobytes() == weights(10).tobytes()
    assert best.evolution("param/w").num_rows == 2
    assert best.snapshots()["step"].to_pylist() == [0, 10]


def test_version_of_a_run_without_a_repository_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="no Icechunk repository"):
        run.tensors.version(tag="best").snapshot("latest")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
import sonde
from sonde.read.tensors.files.formats import open_tensors
run = sonde.open(sys.argv[1])
assert open_tensors(sys.argv[2])["w"].shape == (2, 3)
assert sonde.compare(sys.argv[2], sys.argv[2]).is_same
run.tensors.get("param/layers.0.weight").values
run.tensors.evolution("param/*"); run.tensors.spectra("param/*"); run.tensors.distribution("param/*")
run.tensors.snapshot("latest")["param/eight"]
from sonde.show.export.tensors import plan_export, write_export
from pathlib import Path
write_export(plan_export(run, "weights", "hdf5"), Path(sys.argv[2] + ".h5"))
print("ok")
"""


@pytest.mark.slow
def test_nothing_here_needs_torch(run: Run, tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "w.pt")
    command = [sys.executable, "-c", WITHOUT_TORCH, str(run.path), str(tmp_path / "w.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout.strip() == "ok", result.stderr
