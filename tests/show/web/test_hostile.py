"""Run folders from anybody: shown as far as they can be, refused with a reason where not, never executed or escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hostile_run import NAMES, broken_runs, empty_run, hostile_run

SECRET = "TOP-SECRET-CONTENT"
QUESTIONS = (
    "",
    "/sites",
    "/findings",
    "/health",
    "/system",
    "/events",
    "/flow",
    "/snapshots",
    "/lines?i=0&stat=rms",
    "/scalars?i=0,1,2,3",
    "/heat?kind=grad&stat=rms",
    "/heat?kind=act&stat=abs_q50&w=7",
    "/heat?kind=update&stat=ratio",
    "/heat?kind=health&stat=score",
    "/cell?i=3&step=5",
    "/hist?i=4",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them in one folder of runs, and a secret next to it. Not to be changed."""
    root = tmp_path_factory.mktemp("hostile")
    secret = root / "secret.txt"
    secret.write_text(SECRET)
    (root / "runs").mkdir()
    hostile_run(root / "runs")
    empty_run(root / "runs")
    broken_runs(root / "runs", secret)
    (root / "runs" / "linked project").symlink_to(root, target_is_directory=True)
    return root / "runs"


@pytest.fixture(scope="module")
def here(folder: Path, open_pages: Any) -> Any:
    return open_pages(folder)


def test_list_shows_every_folder_and_says_what_is_wrong(here: Any) -> None:
    rows = here.get("/api/runs")["runs"]
    broken = {row["name"]: row["reason"] for row in rows if row["status"] == "broken"}
    assert len(rows) == 16
    assert set(broken) == {"linked-manifest", "deep-manifest", "huge-manifest", "newer-format", "binary-manifest"}
    assert all(broken.values())
    here.answers.briefs.tasks.wait(20.0)
    assert here.answers.briefs.tasks.num_pending == 0


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_about_any_of_them_fails_or_leaks(here: Any, question: str) -> None:
    """200 or a refusal with a reason; 500 would raise here. What a link leads to is never in an answer."""
    for row in here.get("/api/runs")["runs"]:
        response = here.client.get(f"/api/runs/{row['id']}{question}")
        assert response.status_code in (200, 400, 404, 422), (row["name"], response.text)
        assert SECRET.encode() not in response.content
        if response.headers["content-type"] == "application/json":
            here.get(f"/api/runs/{row['id']}{question}", response.status_code)  # no bare NaN


def test_names_arrive_as_they_are(here: Any) -> None:
    row = next(row for row in here.get("/api/runs")["runs"] if row["name"] == NAMES[1])
    assert row["tags"][0] == NAMES[0]
    sites = here.get(f"/api/runs/{row['id']}/sites")
    assert NAMES[0] in sites["columns"]["name"]
    assert NAMES[0] in [scalar["name"] for scalar in sites["scalars"]]
    assert max(module["depth"] for module in sites["modules"]) <= 32


def ids(here: Any) -> dict[str, str]:
    """By the names of the folders."""
    return {entry.path.name: id for id, entry in here.answers.table.entries().items()}


def test_damage_is_named_in_the_warnings(here: Any) -> None:
    rows = ids(here)
    here.client.get(f"/api/runs/{rows['linked-stats']}/lines?i=0&stat=rms")
    (warning, *_) = here.get(f"/api/runs/{rows['linked-stats']}")["warnings"]
    assert "leads out of the run folder" in warning
    assert "cannot read" in here.get(f"/api/runs/{rows['bad-catalog']}")["warnings"][0]


def test_a_linked_folder_of_tensors_is_not_followed(here: Any) -> None:
    rows = ids(here)
    answer = here.get(f"/api/runs/{rows['linked-tensors']}/snapshots")
    assert answer["snapshots"] == []
    assert "leads out" in answer["problem"]
    assert here.client.get(f"/api/runs/{rows['linked-tensors']}/snapshots/5").status_code == 422


def test_an_empty_run_is_answered_with_nothing(here: Any) -> None:
    rows = {row["name"]: row["id"] for row in here.get("/api/runs")["runs"]}
    api = f"/api/runs/{rows['empty']}"
    assert here.get(api)["last_step"] == -1
    assert here.get(f"{api}/sites")["columns"]["i"] == []
    assert here.get(f"{api}/findings")["findings"] == []
    header, _ = here.get(f"{api}/flow")
    assert header["layers"] == []


def test_a_run_that_vanishes_meanwhile_is_said_to_be_gone(open_page: Any, tmp_path: Path) -> None:
    run = empty_run(tmp_path / "runs")
    page = open_page(tmp_path / "runs")
    (row,) = page.get("/api/runs")["runs"]
    run.rename(tmp_path / "elsewhere")
    assert page.client.get(f"/api/runs/{row['id']}/sites").status_code in (404, 422)


def test_hostile_runs_can_be_compared(here: Any) -> None:
    rows = here.get("/api/runs")["runs"]
    names = {row["name"]: row["id"] for row in rows if row["status"] != "broken"}
    pair = names[NAMES[1]], names["whole"]
    answer = here.get(f"/api/compare?ids={pair[0]},{pair[1]}")
    assert answer["divergences"][0]["problem"] == ""
    header, _ = here.get(f"/api/compare/heat?a={pair[0]}&b={pair[1]}&kind=grad&stat=rms")
    assert NAMES[0] in header["labels"]
