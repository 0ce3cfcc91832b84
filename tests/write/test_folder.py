"""Run folders: unique, found again, and never outside the folder they were asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sonde.errors import RunError
from sonde.schema.records import Event, Site
from sonde.write.folder import create_run, find_resumable, folder_name
from sonde.write.writer import Writer

HOSTILE = [
    "",
    ".",
    "..",
    "../../../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\x00b",
    "\x00",
    "x" * 10_000,
    "é" * 5_000,
    "\ud800",
    "a\udfffb",
    "latest",
    "LATEST",
    ".trash",
    "-rf",
    "~",
    "$(touch x)",
    "a\nb",
    "\x1b[31mred",
    "</script><script>alert(1)</script>",
    "%00",
    "%ED%A0%80",
    "%25",
    "con",
    "nul.txt",
    "a" * 79 + "é",
]


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_stay_inside(tmp_path, name):
    dir = tmp_path / "runs"
    run = create_run(dir, project=name, name=name, config={name: name}, tags=[name], notes=name, command=[name])
    assert run.resolve().parent.parent == dir.resolve()
    assert not run.is_symlink()
    content = json.loads((run / "run.json").read_text("utf-8"))
    assert content["tags"] == [name.encode("utf-8", "backslashreplace").decode()]
    assert find_resumable(dir, project=name, name=name or None) == run
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_different_projects_never_share_a_folder():
    names = [name for name in HOSTILE if name]
    assert len({folder_name(name, "default").lower() for name in names}) == len(names)


def test_hostile_sites_scalars_and_events_are_stored_and_stay_distinct(bench, run, quick):
    for resume in (False, True):
        writer = Writer(run, quick, resume=resume)
        sites = [
            writer.site_id(Site(kind="act", name=name, dtype=name, owner=name, aliases=(name,))) for name in HOSTILE
        ]
        scalars = [writer.scalar_id(name) for name in HOSTILE]
        assert len(set(scalars)) == len(HOSTILE)
        # "\x00" escaped is "%00": a probe escapes names before they come here, so these two are one.
        assert len(set(sites)) == len(HOSTILE) - 2
        for name in HOSTILE:
            writer.event(Event(type=name, message=name, step=0, time=0.0, details={name: name}))
        writer.note(**{name: name for name in HOSTILE})
        writer.close("crashed", reason="\ud800", deadline_s=20)
        assert not writer.degraded
        assert writer.dropped == {"stats": 0, "scalars": 0}
    found = bench.contents(run)
    assert len(found.names) == len(HOSTILE)
    assert len(found.events) == 2 * len(HOSTILE) + 1


def test_runs_of_one_second_are_different_folders(tmp_path):
    runs = {create_run(tmp_path, project="p", name="same") for _ in range(20)}
    assert len(runs) == 20
    assert len({json.loads((run / "run.json").read_text())["id"] for run in runs}) == 20


def test_latest_points_to_the_newest_run(tmp_path):
    create_run(tmp_path, project="p", name="a")
    newest = create_run(tmp_path, project="q", name="b")
    link = tmp_path / "latest"
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == newest.resolve()


def test_without_links_latest_is_a_file_with_the_path(tmp_path, monkeypatch):
    def refuse(self, target, target_is_directory=False):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    run = create_run(tmp_path, project="p", name="a")
    assert tmp_path / (tmp_path / "latest").read_text().strip() == run


def test_a_folder_of_that_name_is_left_alone(tmp_path):
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "mine").touch()
    create_run(tmp_path, project="p", name="a")
    assert (tmp_path / "latest" / "mine").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "p"}


def test_a_file_in_the_way_is_reported(tmp_path):
    (tmp_path / "runs").touch()
    with pytest.raises(RunError, match=r"A file is in the way.*SONDE_DIR"):
        create_run(tmp_path / "runs", project="p")


def test_a_folder_that_cannot_be_written_to_is_reported():
    # The kernel refuses new folders here even to root.
    with pytest.raises(RunError, match=r"cannot create a run in /sys.*SONDE_DIR"):
        create_run(Path("/sys/kernel"), project="p")


def test_a_config_of_any_kind_is_kept(tmp_path):
    config = {"lr": 1e-3, "nan": float("nan"), "path": Path("x"), 3: {"a": (1, 2)}, "f": print}
    content = json.loads((create_run(tmp_path, project="p", config=config) / "run.json").read_text())
    assert content["config"]["lr"] == 1e-3
    assert content["config"]["nan"] == "nan"
    assert content["config"]["3"] == {"a": [1, 2]}


def test_a_config_that_contains_itself_comes_to_an_end(tmp_path):
    config: dict[str, object] = {}
    config["self"] = config
    content = json.loads((create_run(tmp_path, project="p", config=config) / "run.json").read_text())
    assert list(content["config"]) == ["self"]
