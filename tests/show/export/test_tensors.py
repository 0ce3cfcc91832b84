"""Whole tensors leave and come back: every format, every type, hostile names; a killed export resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import duckdb
import h5py
import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from sonde.cli.main import main
from sonde.errors import MissingPackageError, UsageError
from sonde.read.tensors.exports import open_export
from sonde.read.tensors.files.formats import open_tensors
from sonde.read.tensors.tensors import snapshot_tensors
from sonde.run import Run
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.show.export.tensor_files import JOINERS
from sonde.show.export.tensors import FORMATS, plan_export, write_export
from sonde.write.folder import create_run
from sonde.write.tensors.store import open_store
from sonde.write.writer import Writer, WriterOptions

STEPS = (0, 100, 150, 200)
TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
         np.int64, np.int32, np.uint8, np.bool_]  # fmt: skip


def tensors(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    made = {f"grad/layers.{np.dtype(t).name}": (rng.normal(size=(3, 4)) * 3).astype(t) for t in TYPES}
    hostile = {f"grad/{name}": rng.normal(size=2).astype(np.float32) for name in (".", "..", "a%2Fb", "ü", "step")}
    return {
        **made,
        **hostile,
        "grad/scalar": np.array(1.5 + step),
        "grad/empty": np.zeros((0, 3), np.float32),
        "param/w": rng.normal(size=(4, 4)).astype(np.float32),
        "optim/w.exp_avg": rng.normal(size=(4, 4)).astype(ml_dtypes.bfloat16),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = create_run(tmp_path_factory.mktemp("runs"), project="p", name="n", config={"lr": 0.1}, tags=(), notes="")
    store = open_store("zarr", path)
    for step in STEPS:
        host = {name: HostTensor.of(np.asarray(array, order="C")) for name, array in tensors(step).items()}
        store.write(Snapshot(step, 1.0, "test", host))
    store.close()
    Writer(path, WriterOptions()).close("finished")
    return Run(path)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def sonde(*arguments: object, code: int = 0) -> None:
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    assert (exit.value.code or 0) == code


def assert_same(found: Any, expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert np.ascontiguousarray(found[name]).tobytes() == np.ascontiguousarray(array).tobytes(), name


def of(kind: str, step: int) -> dict[str, np.ndarray]:
    return {name: array for name, array in tensors(step).items() if name.startswith(f"{kind}/")}


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_exported_opens_again_as_it_was(format: str, run: Run) -> None:
    (_, *_) = files = write_export(
        plan_export(run, "gradients", format, steps=slice(100, 200)), Path("out." + FORMATS[format])
    )
    found = open_export(Path("out." + FORMATS[format]))
    assert list(found) == [100, 150]
    for step in (100, 150):
        assert_same(found[step], of("grad", step))
    assert all(file.exists() for file in files)
    assert [entry.name for entry in Path().iterdir()] == ["out." + FORMATS[format]]


@pytest.mark.parametrize("format", FORMATS)
def test_one_step_is_one_file(format: str, run: Run) -> None:
    path = Path(f"out.{FORMATS[format]}")
    assert write_export(plan_export(run, "tensors", format, steps=slice(150, 151)), path) == [path]
    assert path.is_file()
    assert_same(open_export(path)[150], tensors(150))


def test_other_programs_open_the_files(run: Run) -> None:
    for format in FORMATS:
        write_export(plan_export(run, "weights", format, steps=slice(150, 151)), Path(f"w.{FORMATS[format]}"))
    expected = tensors(150)["param/w"]
    assert (safetensors.numpy.load_file("w.safetensors")["param/w"] == expected).all()
    with np.load("w.npz") as arrays:
        assert (arrays["param/w"] == expected).all()
    with h5py.File("w.h5") as file:
        assert (file["step-000000150/param/w"][:] == expected).all()
        assert file.attrs["name"] == "n"
    assert pq.read_table("w.parquet")["values"].to_pylist() == [expected.ravel().tolist()]
    assert duckdb.sql("select step, shape, values[2] from 'w.parquet'").fetchall() == [(150, [4, 4], expected[0, 1])]
    assert list(open_tensors("w.h5")) == list(open_tensors("w.safetensors")) == ["param/w"]


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("weights", {"param"}),
        ("gradients", {"grad"}),
        ("optimizer", {"optim"}),
        ("tensors", {"param", "grad", "optim"}),
    ],
)
def test_kinds_are_chosen(what: str, kinds: set[str], run: Run) -> None:
    sonde("export", run.path, "--what", what, "--steps", "-1:", "--format", "npz", "-o", "out.npz")
    (found,) = open_export("out.npz").values()
    assert {name.partition("/")[0] for name in found} == kinds


def test_command_of_the_issue(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sonde("export", run.path, "--what", "gradients", "--steps", "100:200", "--format", "h5")
    assert list(open_export(f"{run.path.name}-gradients.h5")) == [100, 150]
    assert f"{run.path.name}-gradients.h5" in capsys.readouterr().out


def test_default_format_is_safetensors_and_names_are_globs(run: Run) -> None:
    sonde(
        "export",
        run.path,
        "--what",
        "gradients",
        "--series",
        "grad/layers.float*",
        "--steps",
        "0",
        "-o",
        "o.safetensors",
    )
    assert set(open_tensors("o.safetensors")) == {n for n in tensors(0) if n.startswith("grad/layers.float")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--what", "activations"), "no activations at the requested steps"),
        (("--what", "gradients", "--steps", "1:50"), "snapshots, steps 0 to 200"),
        (("--what", "weights", "--format", "csv"), 'no format for weights "csv"'),
        (("--what", "scalars", "--format", "safetensors"), 'no format for scalars "safetensors"'),
        (("--what", "weigths"), 'Did you mean "weights"'),
        (("--what", "weights", "-o", "model.safetensors"), "steps as one file each. Name a folder"),
        (("--what", "weights", "-o", "model.pt"), 'no format for weights "pt"'),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(
    arguments: tuple[str, ...], message: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    sonde("export", run.path, *arguments, code=2)
    assert message in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_folder_is_replaced_only_when_forced(run: Run) -> None:
    arguments = ("export", run.path, "--what", "weights", "-o", "out")
    sonde(*arguments)
    Path("out/mine").write_text("x")
    sonde(*arguments, code=2)
    sonde(*arguments, "--force")
    assert sorted(entry.name for entry in Path("out").iterdir()) == [f"step-{step:09d}.safetensors" for step in STEPS]


def test_complex_numbers_go_where_they_fit(tmp_path: Path) -> None:
    path = create_run(tmp_path / "runs", project="p", name="n", config={}, tags=(), notes="")
    store = open_store("zarr", path)
    values = {"param/c": np.array([1 + 2j, 3]), "param/big": np.array([2**60 + 1])}
    store.write(Snapshot(0, 1.0, "t", {name: HostTensor.of(array) for name, array in values.items()}))
    store.close()
    Writer(path, WriterOptions()).close("finished")
    run = Run(path)
    for format in ("hdf5", "npz"):
        write_export(plan_export(run, "weights", format), Path(f"o.{FORMATS[format]}"))
        assert_same(open_export(f"o.{FORMATS[format]}")[0], values)
    for format, names in (("safetensors", "c"), ("parquet", "c"), ("parquet", "big"), ("arrow", "big")):
        with pytest.raises(UsageError, match=f"param/{names}.*Set format= to"):
            write_export(plan_export(run, "weights", format, names=[f"param/{names}"]), Path("o"))


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("format", FORMATS)
def test_interrupted_export_resumes(format: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(f"out.{FORMATS[format]}")

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        write_export(plan_export(run, "gradients", format), path, stop)
    assert not path.exists()
    read: list[int] = []
    resumed: list[int] = []
    asked = plan_export(run, "gradients", format)
    monkeypatch.setattr(
        "sonde.show.export.tensors.snapshot_tensors",
        lambda reader, step: read.append(step) or snapshot_tensors(reader, step),
    )
    write_export(asked, path, on_resume=resumed.append)
    assert (read, resumed) == ([150, 200], [2])
    for step, found in open_export(path).items():
        assert_same(found, of("grad", step))


def test_parts_are_used_when_more_steps_are_asked_for(run: Run) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        write_export(plan_export(run, "weights", "npz", steps=slice(0, 200)), Path("out"), stop)
    first = {path.name: path.stat().st_ino for path in Path(".out.parts").iterdir()}
    resumed: list[int] = []
    write_export(plan_export(run, "weights", "npz"), Path("out"), on_resume=resumed.append)
    assert resumed == [2]
    kept = {path.stat().st_ino for path in Path("out").iterdir()}
    assert len(kept & set(first.values())) == 2
    assert list(open_export("out")) == list(STEPS)


def test_parts_of_another_request_are_not_used(run: Run) -> None:
    def stop(done: int, total: int) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        write_export(plan_export(run, "gradients", "hdf5"), Path("out.h5"), stop)
    resumed: list[int] = []
    write_export(plan_export(run, "weights", "hdf5"), Path("out.h5"))
    assert set(open_export("out.h5")[0]) == {"param/w"}
    with pytest.raises(StoppedError):
        write_export(plan_export(run, "weights", "npz"), Path("out.h5"), stop)
    write_export(plan_export(run, "weights", "hdf5"), Path("out.h5"), on_resume=resumed.append)
    assert resumed == [0]


def test_second_export_to_the_same_place_waits(run: Run) -> None:
    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(UsageError, match="is running"):
            write_export(plan_export(run, "weights", "hdf5"), Path("out.h5"))

    write_export(plan_export(run, "weights", "hdf5"), Path("out.h5"), meanwhile)


KILLED = """
import os, signal, sys
from pathlib import Path
from sonde.run import Run
from sonde.show.export.tensors import plan_export, write_export

def kill(done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

write_export(plan_export(Run(sys.argv[1]), "gradients", sys.argv[2]), Path(sys.argv[3]), kill)
"""


@pytest.mark.fault
@pytest.mark.parametrize("format", FORMATS)
def test_killed_export_resumes(format: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(f"out.{FORMATS[format]}" if format in JOINERS else "out")  # a folder has no ending
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(run.path), format, str(path)]
    result = subprocess.run(command, capture_output=True, check=False, timeout=120, env={**os.environ})
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not path.exists()
    parts = {part.name: part.stat().st_ino for part in Path(f".{path.name}.parts").iterdir() if "step" in part.name}
    assert len(parts) == 3
    write_export(plan_export(run, "gradients", format), Path("again." + FORMATS[format]))
    sonde("export", run.path, "--what", "gradients", "--format", format, "-o", path)
    assert "3 parts of this export are already done" in capsys.readouterr().err
    for step, found in open_export(path).items():
        assert_same(found, of("grad", step))
    assert not Path(f".{path.name}.parts").exists()


def test_missing_package_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'sonde-ml\[h5\]'"):
        write_export(plan_export(run, "weights", "hdf5"), Path("o.h5"))


def test_a_file_that_is_not_an_export_is_reported(tmp_path: Path) -> None:
    np.savez("a.npz", x=np.ones(1))
    with pytest.raises(UsageError, match="does not contain its step"):
        open_export("a.npz")
    with pytest.raises(UsageError, match=r"\.safetensors"):
        open_export("a.txt")
