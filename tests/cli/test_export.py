"""`sonde export`: every format round-trips, and a file is there whole or not at all."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from sonde.errors import RunError, UsageError
from sonde.read.tensors.export_tables import open_export_tables
from sonde.run import Run
from sonde.run import open as open_run
from sonde.show.export.atomic import replacing
from sonde.show.export.place import explaining_a_full_disk
from sonde.show.export.source import widened

LOSSES = [1.0, float("nan"), float("inf"), -2.5, 1e-300]


@pytest.fixture
def run(make_run: Any) -> Path:
    path: Path = make_run(losses=LOSSES, steps=5, scalars={"train/acc": 0.5}, events=["odd"], config={"lr": 0.1})
    return path


def same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64), equal_nan=True))


def read_csv(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv(run: Path, sonde: Any) -> None:
    sonde("export", run, "--what", "scalars", "--format", "csv", "-o", "out.csv")
    rows = read_csv("out.csv")
    assert same([float(row["value"]) for row in rows if row["name"] == "loss"], LOSSES)
    assert [int(row["step"]) for row in rows if row["name"] == "train/acc"] == [0, 1, 2, 3, 4]


def test_parquet(run: Path, sonde: Any) -> None:
    sonde("export", run, "--what", "stats", "--format", "parquet", "-o", "out.parquet")
    table = pq.read_table("out.parquet", page_checksum_verification=True)
    expected = open_run(run).stats("*")
    assert table.num_rows == expected.num_rows > 0
    assert same(sorted(table["value"].to_pylist(), key=repr), sorted(expected["value"].to_pylist(), key=repr))
    assert json.loads(table.schema.metadata[b"sonde"])["config"] == {"lr": 0.1}


def test_json(run: Path, sonde: Any) -> None:
    sonde("export", run, "--format", "json", "-o", "out.json")
    document = json.loads(Path("out.json").read_text(), parse_constant=pytest.fail)
    losses = [row["value"] for row in document["scalars"] if row["name"] == "loss"]
    assert losses == [1.0, "nan", "inf", -2.5, 1e-300]
    assert document["run"]["config"] == {"lr": 0.1}
    assert document["events"][0]["message"] == "odd"
    assert len(document["stats"]) == open_run(run).stats("*").num_rows
    assert {row["site"] for row in document["sites"]} == {"0.weight", "0.bias", "2.weight"}


def test_hdf5_round_trips(run: Path, sonde: Any) -> None:
    sonde("export", run, "--format", "hdf5", "-o", "out.h5")
    opened = open_run(run)
    with h5py.File("out.h5") as file:
        assert same(file["scalars/loss/value"][:], LOSSES)
        assert file["scalars/train%2Facc"].attrs["name"] == "train/acc"
        assert json.loads(file.attrs["config"]) == {"lr": 0.1}
        assert file["events/message"].asstr()[0] == "odd"
        num_rows = 0
        for kind, sites in file["stats"].items():
            for site, stats in sites.items():
                for stat, series in stats.items():
                    expected = opened.stats(f"{kind}/{site}/{stat}")
                    assert series["step"][:].tolist() == expected["step"].to_pylist()
                    assert same(series["value"][:], expected["value"].to_pylist())
                    num_rows += len(series["step"])
    assert num_rows == opened.stats("*").num_rows


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_everything_goes_into_a_folder_of_files(format: str, run: Path, sonde: Any) -> None:
    files = sonde("export", run, "--format", format, "-o", "out", "--json").json
    assert {Path(file["path"]).name for file in files} == {
        f"{table}.{format}" for table in ("stats", "scalars", "events", "system", "sites")
    }
    assert all(Path(file["path"]).stat().st_size == file["bytes"] > 0 for file in files)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [("1:3", [1, 2]), (":2", [0, 1]), ("-2:", [3, 4]), ("3", [3]), ("-1", [4]), ("::2", [0, 2, 4]), ("7:", [])],
)
def test_steps_are_cut(steps: str, expected: list[int], run: Path, sonde: Any) -> None:
    sonde("export", run, f"--steps={steps}", "--format", "json", "-o", "out.json", "--series", "grad/0.weight/norm")
    document = json.loads(Path("out.json").read_text())
    assert [row["step"] for row in document["stats"]] == expected
    assert [row["step"] for row in document["scalars"] if row["name"] == "loss"] == expected


@pytest.mark.parametrize("steps", ["a:b", "", "1:2:3:4", "1:2:0", "1-2"])
def test_bad_steps_are_a_usage_error(steps: str, run: Path, sonde: Any) -> None:
    assert "invalid --steps" in sonde("export", run, f"--steps={steps}", code=2).stderr


def test_series_are_chosen_by_glob(run: Path, sonde: Any) -> None:
    sonde("export", run, "-w", "stats", "--series", "grad/*/norm", "--series", "grad/0.bias/rms", "-o", "out.parquet")
    table = pq.read_table("out.parquet")
    found = set(zip(table["site"].to_pylist(), table["stat"].to_pylist(), strict=True))
    assert found == {("0.weight", "norm"), ("0.bias", "norm"), ("2.weight", "norm"), ("0.bias", "rms")}


def test_site_that_is_a_glob_of_another_is_written_once(make_run: Any, sonde: Any) -> None:
    make_run(sites=("a[0]", "a0"), steps=2)
    sonde("export", "latest", "-w", "stats", "--series", "grad/*/norm", "-o", "out.parquet")
    assert sorted(pq.read_table("out.parquet")["site"].to_pylist()) == ["a0", "a0", "a[0]", "a[0]"]


def test_unknown_series_writes_nothing(run: Path, sonde: Any) -> None:
    assert 'Did you mean "norm"' in sonde("export", run, "--series", "grad/*/nrm", "-o", "out.parquet", code=2).stderr
    assert not Path("out.parquet").exists()


def test_file_that_is_there_is_not_replaced_unless_forced(run: Path, sonde: Any) -> None:
    Path("out.csv").write_text("mine")
    arguments = ("export", run, "--what", "scalars", "--format", "csv", "-o", "out.csv")
    assert (
        "out.csv already exists. Choose another file with --output, or overwrite it with --force."
        in sonde(*arguments, code=2).stderr
    )
    assert Path("out.csv").read_text() == "mine"
    sonde(*arguments, "--force")
    assert Path("out.csv").read_text().startswith('"step"')


def test_default_name_says_which_run(run: Path, sonde: Any) -> None:
    (file,) = sonde("export", run, "--what", "scalars", "--format", "csv", "--json").json
    assert file["path"] == f"{run.name}-scalars.csv"


def test_failure_leaves_no_half_file() -> None:
    path = Path("out.csv")
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as draft:
            draft.write_text("half")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        fail()
    assert [entry.name for entry in Path().iterdir()] == ["out.csv"]
    assert path.read_text() == "old"


def test_folder_that_is_not_there_is_one_line(run: Path, sonde: Any) -> None:
    error = sonde("export", run, "--what", "scalars", "-o", "no/such/out.parquet", code=1).stderr
    assert "no/such" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "begins"), [("a.csv", b'"step"'), ("a.h5", b"\x89HDF"), ("a.JSON", b"{"), ("a", b"PAR1")]
)
def test_the_ending_of_the_file_says_the_format(name: str, begins: bytes, run: Path, sonde: Any) -> None:
    sonde("export", run, "--what", "scalars", "-o", name)
    assert Path(name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--what", "scalars", "--format", "csv", "-o", "a.parquet"),
            "the format csv does not match the extension of a.parquet (parquet). Change --format or --output.",
        ),
        (("-o", "a.csv"), "csv writes 5 tables as one file each. Name a folder"),
        (("--what", "scalars", "-o", "a.npz"), 'no format for scalars "npz"'),
    ],
)
def test_a_name_that_would_mislead_is_refused(arguments: tuple[str, ...], says: str, run: Path, sonde: Any) -> None:
    assert says in sonde("export", run, *arguments, code=2).stderr
    assert not Path(arguments[-1]).exists()


def test_a_full_disk_is_said_with_what_to_do() -> None:
    said = r"the disk is full: cannot write w.h5. Free some space"
    with pytest.raises(RunError, match=said), explaining_a_full_disk(Path("w.h5")):
        Path("/dev/full").write_bytes(b"x")


def test_hdf5_without_its_package_says_what_to_install(run: Path, sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert "pip install 'sonde-ml[h5]'" in sonde("export", run, "--format", "hdf5", code=1).stderr


@pytest.mark.parametrize(("option", "value"), [("--format", "cvs"), ("--what", "scalar")])
def test_unknown_choice_is_answered_with_the_nearest(option: str, value: str, run: Path, sonde: Any) -> None:
    assert "Did you mean" in sonde("export", run, option, value, code=2).stderr


@pytest.mark.parametrize("format", ["csv", "parquet", "json", "hdf5"])
def test_run_with_nothing_in_it_exports_nothing_without_failing(format: str, make_run: Any, sonde: Any) -> None:
    make_run(steps=0, sites=())
    sonde("export", "latest", "--format", format, "-o", "out")
    assert Path("out").exists()


HOSTILE = ["a/b", "..", ".", "a\x00b", "step", "ü", "x" * 300, "\x1b[31m"]


@pytest.mark.parametrize("format", ["csv", "parquet", "json", "hdf5"])
def test_hostile_names_survive(format: str, make_run: Any, sonde: Any) -> None:
    make_run(steps=2, scalars=dict.fromkeys(HOSTILE, math.nan), sites=("..", ".", "ü"))
    sonde(
        "export",
        "latest",
        "--what",
        "scalars" if format in ("csv", "parquet") else "all",
        "--format",
        format,
        "-o",
        "o",
    )
    stored = set(open_run("latest").scalars()["name"].to_pylist())
    assert len(stored) == len(HOSTILE) + 1
    if format == "parquet":
        assert set(pq.read_table("o")["name"].to_pylist()) == stored
    elif format == "json":
        assert {row["name"] for row in json.loads(Path("o").read_text())["scalars"]} == stored
    elif format == "hdf5":
        with h5py.File("o") as file:
            assert {group.attrs["name"] for group in file["scalars"].values()} == stored
    else:
        assert {row["name"] for row in read_csv("o")} == stored
    assert {entry.name for entry in Path().iterdir()} == {"o", "runs"}


def test_interrupted_export_of_a_large_table_resumes(run: Path, sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonde.show.export.source.ROWS_AT_ONCE", 1)  # a piece per site
    arguments = ("export", run, "--what", "stats", "-o", "out.parquet")
    read: list[str] = []
    stats = Run.stats

    def watched(self: Run, pattern: Any, *, steps: Any = None) -> Any:
        if steps is None:
            read.append(pattern)
            if len(read) == 3:
                raise UsageError("stopped")
        return stats(self, pattern, steps=steps)

    monkeypatch.setattr(Run, "stats", watched)
    sonde(*arguments, code=2)
    assert not Path("out.parquet").exists()
    assert "2 parts of this export are already done" in sonde(*arguments).stderr
    assert len(read) == 4  # of three sites, two were not read again
    assert pq.read_table("out.parquet").num_rows == open_run(run).stats("*").num_rows
    assert not Path(".out.parquet.parts").exists()


def test_arrow(run: Path, sonde: Any) -> None:
    sonde("export", run, "--what", "scalars", "--format", "arrow", "-o", "out.arrow")
    with pa.memory_map("out.arrow") as file:
        table = pa.ipc.open_file(file).read_all()
    assert same(table.filter(pa.compute.equal(table["name"], "loss"))["value"].to_pylist(), LOSSES)


def rows_of(table: pa.Table, columns: list[str]) -> list[tuple[Any, ...]]:
    return sorted(zip(*(map(repr, table[column].to_pylist()) for column in columns), strict=True))


@pytest.mark.parametrize(("format", "output"), [("h5", "out.h5"), ("parquet", "out"), ("arrow", "out")])
def test_tables_open_again_as_they_were(format: str, output: str, make_run: Any, sonde: Any) -> None:
    run = make_run(losses=LOSSES, steps=5, scalars=dict.fromkeys(HOSTILE, 0.5), events=["odd", "ü"])
    sonde("export", run, "--format", format, "-o", output)
    found, opened = open_export_tables(output), open_run(run)
    assert set(found) == {"stats", "scalars", "events", "system", "sites"}
    columns = ["step", "kind", "site", "stat", "value"]
    assert rows_of(found["stats"], columns) == rows_of(opened.stats("*"), columns)
    columns = ["step", "name", "value", "time"]
    assert rows_of(found["scalars"], columns) == rows_of(opened.scalars(), columns)
    assert found["events"]["message"].to_pylist() == opened.events()["message"].to_pylist()


@pytest.fixture
def mixed(make_run: Any) -> Path:
    """A run with scalars of the user's, and with some that sonde records."""
    own = {"val/acc": 0.5, "data/loss/train": 3.0, "data/input/std": 1.0, "unit/0/dead": 0.0, "optim/lr": 0.1}
    path: Path = make_run(steps=3, scalars=own)
    return path


def names(path: str) -> set[str]:
    return {row["name"] for row in read_csv(path)}


def test_scalars_are_those_that_the_user_logged(mixed: Path, sonde: Any) -> None:
    sonde("export", mixed, "--what", "scalars", "-o", "out.csv")
    assert names("out.csv") == {"loss", "val/acc"}


def test_internal_scalars_are_exported_on_request(mixed: Path, sonde: Any) -> None:
    every = {"loss", "val/acc", "data/loss/train", "data/input/std", "unit/0/dead", "optim/lr"}
    sonde("export", mixed, "--what", "scalars", "--internal", "-o", "out.csv")
    assert names("out.csv") == every
    sonde("export", mixed, "--what", "all", "--format", "csv", "-o", "folder")
    assert names("folder/scalars.csv") == every
    sonde("export", mixed, "--what", "scalars", "--series", "data/*", "-o", "data.csv")
    assert names("data.csv") == {"data/loss/train", "data/input/std"}


@pytest.mark.parametrize("format", ["csv", "parquet", "arrow", "json"])
def test_wide_has_a_column_per_scalar(format: str, make_run: Any, sonde: Any) -> None:
    run = make_run(losses=LOSSES, steps=5, scalars={"step": 7.0})
    sonde("export", run, "--what", "scalars", "--shape", "wide", "--format", format, "-o", f"out.{format}")
    if format == "json":
        rows = json.loads(Path("out.json").read_text())["scalars"]
    elif format == "csv":
        rows = read_csv("out.csv")
    else:
        rows = (pq if format == "parquet" else pa.feather).read_table(f"out.{format}").to_pylist()
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4]
    assert same([float(row["loss"]) for row in rows], LOSSES)
    assert {float(row["scalar/step"]) for row in rows} == {7.0}


def test_wide_has_nothing_where_nothing_was_logged() -> None:
    nan = float("nan")
    wide = widened({name: (np.array(steps), np.array(values)) for name, steps, values in (
        ("a", [0, 2], [1.0, nan]), ("b", [2, 5], [3.0, 4.0]),
    )})  # fmt: skip
    assert wide["step"].to_pylist() == [0, 2, 5]
    assert repr(wide["a"].to_pylist()) == "[1.0, nan, None]"
    assert wide["b"].to_pylist() == [None, 3.0, 4.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--what", "stats", "--shape", "wide"], "--shape works only if --what is scalars"),
        (["--internal"], "--internal works only if --what is scalars"),
        (["--what", "scalars", "--shape", "wider"], 'Did you mean "wide"'),
        (["--what", "scalars", "--shape", "wide", "--format", "h5"], "Choose another --format"),
    ],
)
def test_shapes_that_cannot_be_are_refused(arguments: list[str], message: str, mixed: Path, sonde: Any) -> None:
    assert message in sonde("export", mixed, *arguments, code=2).stderr
