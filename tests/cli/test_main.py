"""The command as a whole: help, exit codes, errors in one line, colours, streams."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from sonde.cli.aliases import ALIASES
from sonde.cli.help import first_sentence
from sonde.cli.main import GROUPS, VERBS, app, with_verb
from sonde.errors import nearest


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help_with_examples(verb: str, sonde: Any) -> None:
    text = sonde(verb, "--help").stdout
    assert "Examples:" in text
    assert f"sonde {verb}" in text


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"run"}))
def test_every_reading_verb_has_json(verb: str, sonde: Any) -> None:
    assert "--json" in sonde(verb, "-h").stdout


def test_help_names_every_verb_by_group_and_no_alias(sonde: Any) -> None:
    text = sonde("--help").stdout
    assert all(f"\n{title}:\n" in text for title in GROUPS)
    assert all(f"\n  {verb} " in text for verb in VERBS)
    assert not any(f"\n  {alias} " in text for alias in ALIASES)
    assert sonde().stdout == text
    assert len(text.splitlines()) <= 48


def test_options_that_few_need_come_last(sonde: Any) -> None:
    basic, advanced = sonde("ui", "--help").stdout.split("\nAdvanced:\n")
    assert "--port" in basic
    assert "--allow-host" not in basic
    assert "--allow-host" in advanced


WIDTHS = (60, 80, 100, 200)


def unwrapped(text: str) -> str:
    """The text without line breaks and indentation; a word may be broken after a hyphen."""
    return "".join(text.split())


@pytest.mark.parametrize("columns", WIDTHS)
def test_no_summary_in_the_help_is_cut(columns: int, sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, 40)))
    text = sonde("--help").stdout
    for verb, function in VERBS.items():
        assert unwrapped(verb + first_sentence(function.__doc__ or "")) in unwrapped(text)
    assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("verb", sorted(VERBS | ALIASES))
def test_no_help_text_is_cut(verb: str, columns: int, sonde: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_: os.terminal_size((columns, 40)))
    text = unwrapped(sonde(verb, "--help").stdout)
    command: Any = typer.main.get_command(app)
    for param in command.commands[verb].params:
        assert unwrapped(param.help) in text
    for paragraph in inspect.cleandoc((VERBS | ALIASES)[verb].__doc__ or "").replace("\b", "").split("\n\n"):
        assert unwrapped(paragraph) in text


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


def test_help_is_a_verb(sonde: Any) -> None:
    assert sonde("help") == sonde("--help")
    assert sonde("help", "diagnose") == sonde("diagnose", "--help")
    assert 'no command "help"' in sonde("help", "nosuch", code=2).stderr


def test_a_misspelt_verb_is_named_as_one(sonde: Any) -> None:
    expected = 'Error: no command "diganose". Did you mean "diagnose"? See  sonde --help\n'
    assert sonde("diganose", "latest", code=2).stderr == expected
    assert sonde("diganose", code=2).stderr == expected


def typos(verb: str) -> set[str]:
    """The verb with one letter lost, two swapped, or one doubled."""
    lost = {verb[:i] + verb[i + 1 :] for i in range(len(verb)) if len(verb) > 2}
    swapped = {verb[:i] + verb[i + 1] + verb[i] + verb[i + 2 :] for i in range(len(verb) - 1)}
    doubled = {verb[:i] + verb[i] + verb[i:] for i in range(len(verb))}
    return (lost | swapped | doubled) - set(VERBS)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_one_wrong_letter_still_finds_the_verb(verb: str) -> None:
    for typo in typos(verb):
        meant = [other for other in VERBS if typo in typos(other)]  # "eport" may be either
        assert nearest(typo, VERBS) in [f' Did you mean "{other}"?' for other in meant], typo


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


def test_reader_that_goes_away_is_not_an_error(make_run: Any) -> None:
    make_run()
    shell = f"{sys.executable} -m sonde.cli.main list --json | head -c 1"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in result.stderr


def test_installed_command_is_the_same() -> None:
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="console_scripts", name="sonde")
    assert entry.value == "sonde.cli.main:main"


def test_the_package_runs_as_the_command() -> None:
    command = [sys.executable, "-m", "sonde", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("sonde ")


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


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_help_shows_values_as_a_person_names_them(verb: str, sonde: Any) -> None:
    text = sonde(verb, "--help").stdout
    assert not re.search(r"<\w|>=|\[\[|\{\w+\}|\]\.\.\.\.|\.\.\.\]?\.\.\.", text)


def test_usage_shows_which_arguments_may_be_left_out(sonde: Any) -> None:
    first = [sonde(verb, "--help").stdout.splitlines()[0] for verb in ("diagnose", "compare", "delete", "ui")]
    assert first == [
        "Usage: sonde diagnose [OPTIONS] [RUN]",
        "Usage: sonde compare [OPTIONS] A B",
        "Usage: sonde delete [OPTIONS] RUN...",
        "Usage: sonde ui [OPTIONS] [RUNS]...",
    ]
