"""Damaged files: what is read is right, or the damage is reported. Never wrong numbers, never an unknown exception."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sqlite3
import zlib
from pathlib import Path

import numpy as np
import pytest

import sonde
from sonde.errors import CorruptError, FormatError, NotARunError, RunError
from sonde.read.run import catalog
from sonde.run import Run
from sonde.schema.layout import row_text
from sonde.schema.records import sign_document


def truth(recording) -> tuple[dict[tuple[str, int], float], dict[int, float]]:
    """(site, step) -> sum of squares of gradients, step -> loss."""
    grads = {}
    for (kind, site, step), tensor in recording.tensors.items():
        if kind == "grad":
            grads[site, step] = float((tensor[np.isfinite(tensor)] ** 2).sum())
    return grads, dict(enumerate(recording.losses))


def look(path: Path, grads: dict[tuple[str, int], float], losses: dict[int, float]) -> str:
    """Read everything; "right", "reported", or an AssertionError when something is silently wrong."""
    try:
        run = Run(path)
    except (CorruptError, NotARunError, FormatError) as error:
        return f"reported: {error}"
    reported = []
    for read, expected in ((read_grads, grads), (read_losses, losses)):
        try:
            found = read(run)
        except CorruptError as error:
            reported.append(str(error))
            continue
        wrong = [
            key
            for key, value in found.items()
            if key not in expected or not np.isclose(value, expected[key], rtol=1e-12)
        ]
        assert not wrong, f"silently wrong values: {wrong[:3]}"
        if len(found) < len(expected):
            assert run.warnings, f"{len(expected) - len(found)} rows are silently missing"
            reported += run.warnings
    for read in (run.events, run.system, run.sites):
        try:
            read()
        except CorruptError as error:
            reported.append(str(error))
    assert run.status in ("finished", "crashed", "running")
    return f"reported: {reported[0]}" if reported else "right"


def read_grads(run: Run) -> dict[tuple[str, int], float]:
    table = run.stats("grad/*/sumsq")
    return dict(
        zip(
            zip(table["site"].to_pylist(), table["step"].to_pylist(), strict=True),
            table["value"].to_pylist(),
            strict=True,
        )
    )


def read_losses(run: Run) -> dict[int, float]:
    table = run.scalars("loss")
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory, finished_once):
    """A run whose writer is gone, with rows both sealed and in the log: copied while it was being written."""
    from sonde.write.folder import create_run
    from sonde.write.writer import Writer, WriterOptions

    recording_type = type(finished_once)
    path = create_run(tmp_path_factory.mktemp("killed"), project="gpt", name="killed")
    options = WriterOptions(flush_interval_s=0.02, heartbeat_s=0.02, seal_steps=16)
    recording = recording_type(path, Writer(path, options))
    recording.steps(16).flush().steps(10).flush()
    copy = path.with_name("copy")
    beat = -1
    while beat < 25:  # until the heartbeat has acknowledged all
        beat = sonde.open(path).manifest.heartbeat.acknowledged["stats"]
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.tmp"))  # it is still being written
    recording.finish()
    recording.path = copy
    return recording


def files_of(run: Path, ending: str) -> list[Path]:
    return sorted(path for path in run.rglob(f"*{ending}") if "pyramid" not in path.parts)


def mutate(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    if rng.random() < 0.25 or not data:
        length = rng.randrange(len(data) + 1)
        path.write_bytes(data[:length])
        return f"cut to {length}"
    position, bit = rng.randrange(len(data)), rng.randrange(8)
    data[position] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {position}"


def campaign(recording, ending: str, number: int, tmp_path: Path, seed: int = 0) -> dict[str, int]:
    rng = random.Random(seed)
    grads, losses = truth(recording)
    outcomes = {"right": 0, "reported": 0}
    for trial in range(number):
        copy = tmp_path / f"trial-{trial}"
        shutil.copytree(recording.path, copy)
        path = rng.choice(files_of(copy, ending))
        what = mutate(path, rng)
        try:
            outcomes[look(copy, grads, losses).split(":")[0]] += 1
        except Exception as error:
            raise AssertionError(f"{path.relative_to(copy)}: {what}") from error
        shutil.rmtree(copy)
    return outcomes


def test_undamaged_runs_read_right(finished, killed_once):
    for recording in (finished, killed_once):
        assert look(recording.path, *truth(recording)) == "right"
        assert Run(recording.path).verify() == []


@pytest.mark.parametrize("ending", [".parquet", ".log", ".sqlite-wal"])
def test_a_few_random_damages_of_a_killed_run_are_reported(killed_once, tmp_path, ending):
    assert campaign(killed_once, ending, 15, tmp_path)["reported"] > 0


def test_a_few_random_damages_of_a_finished_catalog_are_reported(finished, tmp_path):
    assert campaign(finished, ".sqlite", 15, tmp_path)["reported"] > 0


@pytest.mark.fault
@pytest.mark.parametrize("ending", [".parquet", ".log", ".sqlite", ".sqlite-wal"])
@pytest.mark.parametrize("seed", [1, 2])
def test_many_random_damages_of_a_killed_run_are_reported(killed_once, tmp_path, ending, seed):
    outcomes = campaign(killed_once, ending, 300, tmp_path, seed)
    assert outcomes["reported"] > 0 or ending == ".sqlite"  # nearly all of the catalog is still in its log


@pytest.mark.fault
@pytest.mark.parametrize("ending", [".parquet", ".sqlite"])
def test_many_random_damages_of_a_finished_run_are_reported(finished, tmp_path, ending):
    assert campaign(finished, ending, 300, tmp_path)["reported"] > 0


@pytest.mark.fault
def test_large_segments_that_are_not_hashed_are_checked_by_their_pages(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("sonde.read.run.segments.ALWAYS_HASHED_BYTES", 0)
    assert campaign(finished, ".parquet", 300, tmp_path)["reported"] > 0


def test_a_flipped_bit_in_a_page_is_found_without_the_hash(finished, monkeypatch):
    monkeypatch.setattr("sonde.read.run.segments.ALWAYS_HASHED_BYTES", 0)
    path = files_of(finished.path / "stats", ".parquet")[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    look(finished.path, *truth(finished))
    assert len(Run(finished.path).verify()) == 1


def test_every_flipped_bit_of_a_signed_run_json_is_reported(finished):
    path = finished.path / "run.json"
    document = json.loads(path.read_text())
    document.pop("crc32", None)
    signed = sign_document(json.dumps(document)).encode()
    path.write_bytes(signed)
    assert Run(finished.path).config == {"lr": 0.1}
    rng = random.Random(0)
    for _ in range(300):
        position = rng.randrange(len(signed) - 24)  # the rest is the checksum itself
        path.write_bytes(signed[:position] + bytes([signed[position] ^ 1 << rng.randrange(8)]) + signed[position + 1 :])
        with pytest.raises((CorruptError, NotARunError)):
            Run(finished.path)


def test_a_log_cut_at_the_end_of_a_frame_differs_from_a_clean_end(killed_once, tmp_path):
    copy = shutil.copytree(killed_once.path, tmp_path / "copy")
    log = copy / "stats" / "rank-0000" / "live.log"
    state = Run(copy)._state
    frames = next(file for file in state.logs["stats"][0].files.values()).frames
    os.truncate(log, frames[-3].end + 16 if frames[0].end < frames[-3].end else 0)
    (warning,) = [text for text in Run(copy).warnings if "cannot be read" in text]
    assert "2 records" in warning


def test_a_killed_run_is_read_where_sqlite_may_not_write(killed_once, tmp_path, monkeypatch):
    """On a read-only disk SQLite cannot open a catalog whose log is next to it: a copy is read."""
    copy = shutil.copytree(killed_once.path, tmp_path / "copy")
    original = catalog._open

    def open_elsewhere(path: Path, query: str) -> sqlite3.Connection:
        if path.is_relative_to(copy):
            raise sqlite3.OperationalError("unable to open database file")
        return original(path, query)

    monkeypatch.setattr(catalog, "_open", open_elsewhere)
    assert look(copy, *truth(killed_once)) == "right"


def test_a_torn_tail_that_was_never_acknowledged_is_not_a_loss(killed_once, tmp_path):
    copy = shutil.copytree(killed_once.path, tmp_path / "copy")
    log = copy / "stats" / "rank-0000" / "live.log"
    frame = log.read_bytes()[16:400]
    with log.open("ab") as file:
        file.write(frame[:100])
    run = Run(copy)
    assert [w for w in run.warnings if "incomplete record" in w]
    assert not [w for w in run.warnings if "cannot be read" in w]
    assert len(read_grads(run)) == len(truth(killed_once)[0])


def test_a_damaged_segment_is_named_and_the_rest_is_read(finished):
    first, *_ = files_of(finished.path / "stats", ".parquet")
    first.write_bytes(first.read_bytes()[:-40])
    run = Run(finished.path)
    steps = sorted(set(run.stats("grad/*/norm")["step"].to_pylist()))
    assert steps
    assert steps[-1] == 39
    assert any(first.name in warning for warning in run.warnings)
    missing = sorted(set(range(40)) - set(steps))
    with pytest.raises(CorruptError, match=first.name):
        run.stats("grad/*/norm", steps=range(missing[0], missing[-1] + 1))
    assert run.scalars("loss").num_rows == 40


def test_a_missing_segment_is_named(finished):
    for path in files_of(finished.path / "stats", ".parquet"):
        path.unlink()
    with pytest.raises(CorruptError, match="missing"):
        Run(finished.path).stats("grad/*/norm")


def test_a_segment_of_another_run_is_not_taken_for_its_own(finished, record):
    other = record("other", seed=7)
    for _ in range(5):
        other.steps(8).flush()
    other.finish()
    for own in files_of(finished.path / "stats", ".parquet"):
        foreign = other.path / own.relative_to(finished.path)
        if foreign.exists():
            shutil.copyfile(foreign, own)
    assert look(finished.path, *truth(finished)).startswith("reported")


def test_a_wrong_row_of_the_catalog_is_not_used(finished):
    with sqlite3.connect(finished.path / "catalog.sqlite") as connection:
        connection.execute("update sites set name = '0.other' where kind = 'grad' and name = '0.weight'")
    run = Run(finished.path)
    assert any("1 of 8 rows of sites" in warning for warning in run.warnings)
    assert set(run.stats("grad/*/norm")["site"].to_pylist()) == {"0.bias"}


@pytest.mark.parametrize("table", ["sites", "scalar_names"])
def test_a_name_that_is_missing_from_the_catalog_is_reported(finished, table):
    with sqlite3.connect(finished.path / "catalog.sqlite") as connection:
        connection.execute(f"delete from {table} where id = (select max(id) from {table})")
    assert any("are missing" in warning for warning in Run(finished.path).warnings)


# ---------------------------------------------------------------------------------------------- runs made to harm


def forge(path: Path, table: str, id: int, **values: object) -> None:
    """Change a catalog row and give it a right checksum."""
    with sqlite3.connect(path / "catalog.sqlite") as connection:
        for column, value in values.items():
            connection.execute(f"update {table} set {column} = ? where id = ?", (value, id))
        row = connection.execute(f"select * from {table} where id = ?", (id,)).fetchone()
        connection.execute(f"update {table} set crc = ? where id = ?", (zlib.crc32(row_text(*row[:-1])), id))


def move_out(path: Path, tmp_path: Path) -> None:
    """Put a link to the outside in place of a file or folder."""
    (tmp_path / "outside").mkdir()
    outside = shutil.move(path, tmp_path / "outside" / path.name)
    path.symlink_to(outside)


def look_closely(path: Path) -> None:
    run = Run(path)
    run.stats("grad/*/norm")
    run.scalars("loss")


@pytest.mark.parametrize("name", ["run.json", "catalog.sqlite", "stats", "scalars"])
def test_links_that_leave_the_run_are_not_followed(finished, tmp_path, name):
    move_out(finished.path / name, tmp_path)
    with pytest.raises(CorruptError, match="out of the run folder"):
        look_closely(finished.path)


def test_links_inside_the_run_are_followed(finished):
    (finished.path / "scalars").rename(finished.path / "moved")
    (finished.path / "scalars").symlink_to("moved")
    assert Run(finished.path).scalars("loss").num_rows == 40


def test_a_segment_that_is_a_link_to_the_outside_is_refused(finished, tmp_path):
    path = files_of(finished.path / "scalars", ".parquet")[0]
    shutil.move(path, tmp_path / "elsewhere.parquet")
    path.symlink_to(tmp_path / "elsewhere.parquet")
    with pytest.raises(CorruptError, match="out of the run folder"):
        Run(finished.path).scalars()


@pytest.mark.parametrize("file", ["../../../secret.parquet", "/etc/passwd", "stats/../../x"])
def test_a_catalog_that_names_files_outside_is_refused(finished, file):
    with sqlite3.connect(finished.path / "catalog.sqlite") as connection:
        (id,) = connection.execute("select id from segments where stream = 'scalars' and level = 0").fetchone()
    forge(finished.path, "segments", id, file=file)
    with pytest.raises(CorruptError):
        Run(finished.path).scalars()


def test_counts_that_the_file_does_not_hold_are_refused(finished):
    with sqlite3.connect(finished.path / "catalog.sqlite") as connection:
        (id,) = connection.execute("select id from segments where stream = 'scalars' and level = 0").fetchone()
    forge(finished.path, "segments", id, num_rows=10**12)
    with pytest.raises(CorruptError, match="rows, but the catalog says"):
        Run(finished.path).scalars()


@pytest.mark.parametrize(
    "values",
    [{"tiles": "[[1]]"}, {"tiles": "{"}, {"tiles": "7"}, {"first_step": "x"}, {"stream": "x"}, {"level": None}],
)
def test_rows_of_the_catalog_that_make_no_sense_are_reported(finished, values):
    with sqlite3.connect(finished.path / "catalog.sqlite") as connection:
        (id,) = connection.execute("select id from segments where stream = 'scalars' and level = 0").fetchone()
        connection.execute("pragma writable_schema = on")
        connection.execute("update sqlite_master set sql = replace(sql, 'not null', '') where name = 'segments'")
    forge(finished.path, "segments", id, **values)
    assert look(finished.path, *truth(finished)).startswith("reported")


def test_a_view_in_place_of_a_table_is_not_asked(finished):
    with sqlite3.connect(finished.path / "catalog.sqlite") as connection:
        connection.execute("drop table events")
        connection.execute(
            "create view events as with recursive n(i) as (select 1 union all select i + 1 from n) select i from n"
        )
    with pytest.raises(CorruptError, match="not a plain table"):
        Run(finished.path).events()


def test_a_pipe_in_place_of_a_file_does_not_hang(finished):
    for name in ("run.json", "lock"):
        (finished.path / name).unlink()
        os.mkfifo(finished.path / name)
    with pytest.raises(RunError):
        Run(finished.path)


def test_a_frame_that_claims_to_be_huge_is_not_believed(finished):
    log = finished.path / "stats" / "rank-0000" / "live.log"
    header = log.read_bytes()[:16]
    log.write_bytes(header + b"SNDF" + (0xFFFFFFFF).to_bytes(4, "little") + bytes(100))
    assert look(finished.path, *truth(finished)) == "right"
    log.write_bytes(header + b"SNDF" + (100).to_bytes(4, "little") + bytes(200))
    assert any("damaged" in warning for warning in Run(finished.path).warnings)


def test_a_sparse_log_of_many_gigabytes_is_not_read_into_memory(finished):
    log = finished.path / "stats" / "rank-0000" / "live.log"
    header = log.read_bytes()[:16]
    log.write_bytes(header)
    os.truncate(log, 1 << 40)
    run = Run(finished.path)
    assert any("damaged" in warning for warning in run.warnings)
    assert len(read_grads(run)) == 80


def test_hashes_are_those_of_the_files(finished):
    for segment in Run(finished.path)._state.catalog.segments:
        assert hashlib.sha256(finished.path.joinpath(*segment.parts).read_bytes()).hexdigest() == segment.sha256
