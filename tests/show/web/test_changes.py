"""The few things a page may change: states of findings, and runs to the trash and back."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from big_run import Plan, Planted, big_run
from sonde.run import open as open_run
from sonde.write.writer import Writer, WriterOptions


@pytest.fixture
def own(tmp_path: Path, open_page: Any) -> Any:
    """A run of this test's own."""
    plan = Plan(num_tensors=4, num_steps=60, planted=(Planted(tensor=1, step=30, num_nan=2),))
    run = big_run(tmp_path / "runs", plan)
    page = open_page(tmp_path / "runs")
    page.run = run
    page.id = page.get("/api/runs")["runs"][0]["id"]
    page.api = f"/api/runs/{page.id}"
    return page


def test_delete_and_undo(own: Any) -> None:
    files = sorted(path.relative_to(own.run) for path in own.run.rglob("*"))
    own.delete(own.api)
    answer = own.get("/api/runs")
    assert (answer["runs"], [one["id"] for one in answer["trash"]]) == ([], [own.id])
    own.get(own.api, 404)
    own.post(f"{own.api}/restore")
    assert own.get(own.api)["last_step"] == 59
    assert sorted(path.relative_to(own.run) for path in own.run.rglob("*")) == files
    assert own.get("/api/runs")["trash"] == []
    own.post(f"{own.api}/restore", status=404)


def test_undo_works_after_a_restart(own: Any, open_page: Any, tmp_path: Path) -> None:
    own.delete(own.api)
    again = open_page(tmp_path / "runs")
    again.post(f"{own.api}/restore")
    assert open_run(own.run).last_step == 59


def test_undo_does_not_follow_what_others_wrote_into_the_trash(own: Any, tmp_path: Path) -> None:
    own.delete(own.api)
    (name,) = [path.name for path in (tmp_path / "runs" / ".trash").iterdir() if path.is_dir()]
    origins = tmp_path / "runs" / ".trash" / "origins.json"
    for evil in ("../../outside", "/tmp/outside", ".ssh/run", "a/b/c", "a/../../b", ""):
        origins.write_text(json.dumps({name: evil}))
        assert own.get("/api/runs")["trash"] == []
    origins.write_text(json.dumps({"../..": "gpt/run"}))
    assert own.get("/api/runs")["trash"] == []


def test_undo_does_not_replace_a_run_that_is_there_again(own: Any) -> None:
    own.delete(own.api)
    own.run.mkdir(parents=True)
    assert "already exists" in own.post(f"{own.api}/restore", status=409).text


def test_a_running_run_is_not_deleted(own: Any) -> None:
    writer = Writer(own.run, WriterOptions(), resume=True)
    try:
        assert "is running" in own.delete(own.api, status=409).text
        assert own.run.exists()
    finally:
        writer.close("finished")


def test_read_only_changes_nothing(own: Any, open_page: Any, tmp_path: Path) -> None:
    page = open_page(tmp_path / "runs", can_delete=False)
    assert page.get("/api/runs")["can_delete"] is False
    page.delete(own.api, status=409)
    page.post(f"{own.api}/findings/0/state", {"state": "muted"}, status=409)
    assert own.run.exists()


def test_a_finding_can_be_muted_and_opened_again(own: Any, open_page: Any, tmp_path: Path) -> None:
    finding = own.get(f"{own.api}/findings")["findings"][0]
    before = {path: path.read_bytes() for path in own.run.rglob("*") if path.is_file()}
    own.post(f"{own.api}/findings/0/state", {"state": "muted", "key": finding["key"]})
    muted = open_page(tmp_path / "runs").get(f"{own.api}/findings")  # another server sees it too
    assert muted["findings"][0]["state"] == "muted"
    assert sum(muted["counts"].values()) == len(muted["findings"]) - 1
    assert {path: path.read_bytes() for path in own.run.rglob("*") if path.is_file()} == before
    own.post(f"{own.api}/findings/0/state", {"state": "open"})
    assert own.get(f"{own.api}/findings")["findings"][0]["state"] == "open"


def test_the_state_goes_to_the_finding_that_was_meant(own: Any) -> None:
    """Findings move in their list while a run continues; the key says which."""
    findings = own.get(f"{own.api}/findings")["findings"]
    own.post(f"{own.api}/findings/{len(findings) + 3}/state", {"state": "acknowledged", "key": findings[0]["key"]})
    assert own.get(f"{own.api}/findings")["findings"][0]["state"] == "acknowledged"


@pytest.mark.parametrize("body", [{"state": "deleted"}, {}, [], "muted", None, {"state": ["open"]}])
def test_other_states_are_refused(own: Any, body: Any) -> None:
    own.post(f"{own.api}/findings/0/state", body, status=400)


@pytest.mark.parametrize(("path", "key"), [("/findings/999/state", None), ("/findings/0/state", "nonsense")])
def test_findings_that_are_not_there_have_no_state(own: Any, path: str, key: str | None) -> None:
    own.post(own.api + path, {"state": "muted"} | ({"key": key} if key else {}), status=404)


def test_a_file_of_nonsense_states_is_ignored(own: Any, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"x": 1}', "[" * 100_000, json.dumps({"ecf0ffd4": {"k": {"state": "<b>"}}})):
        (tmp_path / "runs" / ".sonde-findings.json").write_text(text)
        time.sleep(0.01)
        assert {finding["state"] for finding in own.get(f"{own.api}/findings")["findings"]} == {"open"}


def test_muted_findings_do_not_count_in_the_list(own: Any) -> None:
    own.answers.briefs.tasks.wait(10.0)
    before = own.get("/api/runs")["runs"][0]["brief"]["findings"]
    finding = next(f for f in own.get(f"{own.api}/findings")["findings"] if f["severity"] == "warning")
    own.post(f"{own.api}/findings/{finding['n']}/state", {"state": "muted"})
    after = own.get("/api/runs")["runs"][0]["brief"]["findings"]
    assert after["warning"] == before["warning"] - 1
