"""The command as a whole: help, exit codes, errors in one line, colours, streams."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sonde.cli.main import VERBS, with_verb


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help_with_examples(verb: str, sonde: Any) -> None:
    text = sonde(verb, "--help").stdout
    assert "Examples:" in text
    assert f"sonde {verb}" in text


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"run"}))
def test_every_reading_verb_has_json(verb: str, sonde: Any) -> None:
    assert "--json" in sonde(verb, "-h").stdout


def test_help_names_every_verb(sonde: Any) -> None:
    text = sonde("--help").stdout
    assert all(f"  {verb} " in text for verb in VERBS)


@pytest.mark.parametrize(
    "arguments",
    [["list", "--nonsense"], ["show", "--at", "x"], ["compare", "only-one"], ["query", "latest"], ["delete"]],
)
def test_wrong_usage_exits_2(arguments: list[str], sonde: Any) -> None:
    answer = sonde(*arguments, code=2)
    assert answer.stdout == ""
    assert answer.stderr


def test_a_bare_path_is_show_and_a_verb_is_a_verb() -> None:
    assert with_verb(["runs/latest", "--json"]) == ["show", "runs/latest", "--json"]
    assert with_verb(["--json", "x"]) == ["--json", "show", "x"]
    assert with_verb(["list", "x"]) == ["list", "x"]
    assert with_verb(["--help"]) == ["--help"]
    assert with_verb([]) == []


def test_a_misspelt_verb_is_named_as_one(sonde: Any) -> None:
    assert 'no verb "diganose". Did you mean "diagnose"?' in sonde("diganose", "latest", code=2).stderr


def test_traceback_only_on_request(process: Any) -> None:
    quiet = process("show", "nothing")
    assert quiet.code == 1
    assert quiet.stderr.count("\n") == 1
    assert "Traceback" in process("--debug", "show", "nothing").stderr
    assert "Traceback" in process("show", "nothing", env={"SONDE_DEBUG": "1"}).stderr


def test_no_colour_in_a_pipe_nor_with_no_color(process: Any, make_run: Any) -> None:
    make_run(status="crashed")
    assert "\x1b[" not in process("list").stdout
    coloured = process("list", env={"FORCE_COLOR": "1", "TERM": "xterm-256color"}).stdout
    assert "\x1b[1;31m" in coloured
    without = process("list", env={"FORCE_COLOR": "1", "TERM": "xterm-256color", "NO_COLOR": "1"}).stdout
    assert "[31m" not in without
    assert "crashed" in without


def test_terminal_without_unicode(process: Any, make_run: Any) -> None:
    make_run(name="größe")
    answer = process("list", env={"PYTHONIOENCODING": "ascii"})
    assert answer.code == 0
    assert answer.stdout.isascii()
    assert "#" in answer.stdout


def test_names_are_not_cut_in_a_pipe(process: Any, make_run: Any) -> None:
    name = "a-rather-long-name-for-a-run-that-would-not-fit-into-eighty-columns"
    make_run(name=name)
    assert name in process("list").stdout


def test_reader_that_goes_away_is_no_error(make_run: Any) -> None:
    import subprocess

    make_run()
    shell = f"{sys.executable} -m sonde.cli.main list --json | head -c 1"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr


def test_installed_command_is_the_same() -> None:
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="console_scripts", name="sonde")
    assert entry.value == "sonde.cli.main:main"


@pytest.fixture
def forwarded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the session is asked to run."""
    from sonde import session  # type: ignore[attr-defined]

    calls: list[Any] = []

    def run_script(script: str, arguments: list[str], **options: Any) -> int:
        calls.append((script, arguments, options))
        return 3

    monkeypatch.setattr(session, "run_script", run_script)
    return calls


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lr", "3e-4"],
        ["--help"],
        ["-m", "x", "--name", "theirs", "--json", "--debug"],
        ["--", "-x", "list"],
        ["a b", "", "ü", "--x=--y"],
    ],
)
def test_arguments_of_the_script_are_untouched(arguments: list[str], forwarded: list[Any], sonde: Any) -> None:
    sonde("run", "--project", "gpt", "train.py", *arguments, code=3)
    assert forwarded == [("train.py", arguments, {"is_module": False, "project": "gpt"})]


def test_module_and_options_of_sonde(forwarded: list[Any], sonde: Any) -> None:
    sonde("run", "-m", "--name", "n", "--tag", "a", "--tag", "b", "--dir", "d", "pkg.train", "--name", "x", code=3)
    options = {"is_module": True, "name": "n", "tags": ("a", "b"), "dir": Path("d")}
    assert forwarded == [("pkg.train", ["--name", "x"], options)]


def test_run_without_a_script_is_a_usage_error(sonde: Any) -> None:
    assert sonde("run", code=2).stdout == ""
