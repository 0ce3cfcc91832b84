"""Python accepts what the commands accept: every option has a counterpart, and every form means the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

import sonde
from sonde.cli.main import app
from sonde.errors import SondeError, UsageError
from sonde.read.tensors.analysis.run_tensors import RunTensors
from sonde.show import delete_run, export_run, report_run, request_snapshot
from sonde.tune.analyzer import CheckpointAnalyzer
from sonde.write.tensors.push import push

Command = Callable[..., Any]
MakeRun = Callable[..., Path]
Counterpart = tuple[Callable[..., Any], dict[str, str]]

# Options that only a command needs: how it prints and asks, and what a list or a table of Python already does.
OF_THE_COMMAND = {
    "json",
    "as_json",
    "top",
    "yes",
    "exit_code",
    "divergence",
    "open",
    "sort",
    "limit",
    "table",
    "type",
    "severity",
    "exit_zero",
    "settings",
    "all",
}
COUNTERPARTS: dict[str, Counterpart] = {
    "list": (sonde.runs, {"project": "project", "status": "status", "tag": "tag", "dir": "dir"}),
    "show": (sonde.Run.scalars, {"run": "self", "at": "steps"}),
    "show --by_rank": (sonde.Run.ranks, {"run": "self"}),
    "show --tensors": (RunTensors.standing, {"run": "self", "tensors": "pattern", "at": "step", "spectra": "spectra"}),
    "compare": (sonde.compare, {"a": "a", "b": "b", "tolerance": "tolerance", "kind": "kind", "dir": "dir"}),
    "query": (sonde.Run.sql, {"run": "self", "sql": "query", "limit": "limit"}),
    "diagnose": (sonde.Run.diagnosis, {"run": "self"}),
    "plot": (
        sonde.Run.plot,
        {name: name for name in ("pattern", "style", "log", "steps", "title", "size")} | {"run": "self"},
    ),
    "export": (
        export_run,
        {name: name for name in ("run", "what", "format", "output", "steps", "series", "internal", "shape", "force")},
    ),
    "report": (report_run, {"where": "run", "output": "output", "format": "format", "force": "force"}),
    "report --gradients": (CheckpointAnalyzer.export_raw_gradients, {"where": "self", "gradients": "path"}),
    "delete": (delete_run, {"names": "run", "permanently": "permanently", "dir": "dir"}),
    "snapshot": (request_snapshot, {name: name for name in ("run", "kinds", "wait", "timeout_s")}),
    "snapshot --upload": (push, {"run": "run", "patience_s": "patience_s"}),
}
"""The function that does the same as a verb or, with an option, another one; and the names of its parameters."""
PRINTED = {"plot": {"output", "force"}, "query": {"format"}}
"""Of the figure, `figure.savefig(output)`; of the table, Arrow's own formats."""
OPENED = {"run", "dir", "names"}
"""A command opens the run that a function is given: `sonde.open(run, dir=dir)`."""


@pytest.mark.parametrize("verb", sorted({use.split()[0] for use in COUNTERPARTS}))
def test_every_option_has_a_counterpart(verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    rest = {parameter.name for parameter in command.params} - {"help"} - OF_THE_COMMAND - OPENED
    rest -= PRINTED.get(verb, set())
    for use, (function, named) in COUNTERPARTS.items():
        if use.split()[0] == verb:
            rest -= {*named, use.rpartition(" --")[2]}
            assert set(named.values()) <= inspect.signature(function).parameters.keys()
    assert not rest


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SONDE_DIR", raising=False)
    return tmp_path


@pytest.fixture(name="command")
def _command(request: pytest.FixtureRequest) -> Command:
    """The fixture `sonde`, which shares its name with the module."""
    return request.getfixturevalue("sonde")  # type: ignore[no-any-return]


@pytest.fixture
def run(in_folder: Path, make_run: MakeRun) -> sonde.Run:
    make_run(name="other", project="vit", steps=3)
    return sonde.Run(make_run(tags=["small"], steps=20))


REFERENCES: list[Callable[[sonde.Run], str]] = [
    lambda run: "latest",
    lambda run: "runs/latest",
    lambda run: run.id,
    lambda run: run.id[:5],
    lambda run: "baseline",
    lambda run: "base",
    lambda run: "gpt/baseline",
    lambda run: "gpt/base",
    lambda run: run.path.name,
    lambda run: str(run.path),
    lambda run: f"{run.id}@attempt=0",
]


@pytest.mark.parametrize("reference", REFERENCES)
def test_runs_have_the_same_names(run: sonde.Run, command: Command, reference: Callable[[sonde.Run], str]) -> None:
    name = reference(run)
    assert command("show", name, "--json").json["id"] == sonde.open(name).id == run.id


def test_the_folder_of_runs_is_the_setting(in_folder: Path, make_run: MakeRun, command: Command) -> None:
    make_run("elsewhere")
    Path("sonde.yaml").write_text("dir: elsewhere")
    assert [row["id"] for row in command("list", "--json").json] == [run.id for run in sonde.runs()]
    assert command("show", "latest", "--json").json["id"] == sonde.open("latest").id
    assert sonde.compare("latest", "baseline").first_divergence is None


def test_a_run_folder_opens_whatever_the_settings_file_says(run: sonde.Run) -> None:
    Path("sonde.yaml").write_text("no: [")
    assert sonde.open(run.path).id == run.id


@pytest.mark.parametrize("steps", ["3:5", "-2:", ":2", "1", "-1", "0:12:5", "7:", "100:"])
def test_steps_have_the_same_forms(run: sonde.Run, command: Command, steps: str) -> None:
    command("export", run.id, "--what", "scalars", f"--steps={steps}", "-o", "loss.json")
    (path,) = export_run(run, "scalars", steps=steps, output="same.json")
    assert path.read_text() == Path("loss.json").read_text()
    table = run.scalars("loss", steps=steps)
    assert table.num_rows == run.stats("grad/0.weight/norm", steps=steps).num_rows
    assert path.read_text().count('"loss"') >= table.num_rows


@pytest.mark.parametrize("steps", ["", "a:b", "1:2:3:4", "5:1:0", "1.5"])
def test_invalid_steps_are_refused_alike(run: sonde.Run, command: Command, steps: str) -> None:
    with pytest.raises(UsageError, match="give first:stop") as refused:
        run.scalars("loss", steps=steps)
    said = command("export", run.id, f"--steps={steps}", code=2).stderr
    assert str(refused.value) in said.replace("invalid --steps", "invalid steps")


KINDS = {
    "param": ("param",),
    "param,grad": ("param", "grad"),
    "grad, param": ("param", "grad"),
    "all": ("param", "grad", "act", "optim", "batch"),
}


@pytest.mark.parametrize("text", KINDS)
def test_kinds_are_separated_by_commas(text: str) -> None:
    assert sonde.Snapshots(kinds=text).kinds == KINDS[text]


@pytest.mark.parametrize("text", ["weights", "param,weights", ","])
def test_unknown_kinds_are_refused_alike(run: sonde.Run, command: Command, text: str) -> None:
    with pytest.raises(UsageError) as refused:
        request_snapshot(run, text)
    said = command("snapshot", run.id, "--kinds", text, code=2).stderr
    assert str(refused.value) in " ".join(said.split())
    with pytest.raises(UsageError):
        sonde.Snapshots(kinds=text)


def test_filters_of_list(run: sonde.Run, command: Command) -> None:
    for options, keywords in (
        (["--project", "vit"], {"project": "vit"}),
        (["--tag", "small"], {"tag": "small"}),
        (["--status", "crashed"], {"status": "crashed"}),
        (["--status", "finished"], {"status": "finished"}),
    ):
        found = [one.id for one in sonde.runs(**keywords)]  # type: ignore[arg-type]
        assert [row["id"] for row in command("list", "--json", *options).json] == found
    with pytest.raises(UsageError, match="Did you mean"):
        sonde.runs(status="crashd")  # type: ignore[arg-type]


def test_sizes_of_figures(run: sonde.Run) -> None:
    assert run.plot("loss", size="6.4x3.2").get_size_inches().tolist() == [6.4, 3.2]
    assert run.plot("loss", size=(6.4, 3.2)).get_size_inches().tolist() == [6.4, 3.2]
    for wrong in ("6.4", "0x3", (6.4, -1.0)):
        with pytest.raises(UsageError, match="width x height"):
            run.plot("loss", size=wrong)


def test_reports_and_deletion(run: sonde.Run) -> None:
    report_run(run, "report.md")
    with pytest.raises(UsageError, match="CheckpointAnalyzer"):
        report_run(run, "report.txt")
    with pytest.raises(UsageError, match="Choose one with format=: html"):
        report_run(run, "report.doc")
    trashed = delete_run(run)
    assert trashed is not None
    assert trashed.is_dir()
    assert [one.project for one in sonde.runs()] == ["vit"]
    assert delete_run(sonde.runs()[0], permanently=True) is None
    assert sonde.runs() == []


def test_a_request_to_an_ended_run_says_so(run: sonde.Run) -> None:
    with pytest.raises(SondeError, match="has already finished"):
        request_snapshot(run)
