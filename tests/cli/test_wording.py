"""Errors name what the command line has: options, or else variables; and click's errors look like ours."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import sonde as library
from sonde.cli.main import VERBS, _options
from sonde.cli.output import in_options
from sonde.config import Settings, ordered_names, variable_of
from sonde.show import delete_run, export_run, report_run
from sonde.tune import TrainingWrapper

BAD: dict[str, Any] = {
    "dir": 3, "project": "", "mode": "of", "verbose": "perhaps", "live_rules": "x", "check_finite": "x",
    "system_metrics": "x",
}  # fmt: skip


def nested(name: str, value: Any) -> dict[str, Any]:
    head, _, rest = name.partition(".")
    return {head: nested(rest, value)} if rest else {head: value}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_setting_is_named_as_the_verb_has_it(verb: str) -> None:
    options = _options(verb)
    for name in ordered_names():
        said = in_options(f"choose another with {name}= or {variable_of(name)}.", options)
        place = f"{options[name]} or {variable_of(name)}" if name in options else variable_of(name)
        assert said == f"choose another with {place}."


@pytest.mark.parametrize("name", ordered_names())
def test_an_invalid_value_of_every_setting_is_named_by_keyword_in_python_and_by_variable_here(name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}= is ") as error:
        Settings.load(**nested(name, BAD.get(name, -1)))
    assert in_options(str(error.value), {}).startswith(f"{variable_of(name)} is ")


def test_code_is_left_as_it_is() -> None:
    code = 'Start one:  sonde.init(project="x", dir=..., budget=0.1)'
    assert in_options(code, {"project": "--project", "dir": "--dir"}) == code


def test_flags_and_invalid_values_are_named_as_options() -> None:
    options = {"force": "--force", "steps": "--steps"}
    assert in_options("overwrite it with force=True.", options) == "overwrite it with --force."
    assert in_options("overwrite it with force=True.", {}) == "overwrite it with force=True."
    assert in_options('invalid steps "x": give a step', options) == 'invalid --steps "x": give a step'
    assert in_options('invalid kind "x"', options) == 'invalid kind "x"'


def test_options_of_run_are_named_as_options(sonde: Any) -> None:
    Path("train.py").write_text("")
    assert sonde("run", "--budget", "7", "train.py", code=2).stderr.startswith("Error: --budget is 7.0: it should be ")
    Path("runs").write_text("a file")
    assert "choose another folder with --dir or SONDE_DIR." in sonde("run", "train.py", code=1).stderr


def test_a_verb_without_the_option_names_the_variable(sonde: Any) -> None:
    assert "Point to another folder with --dir or SONDE_DIR" in sonde("show", "x", code=1).stderr
    assert "Point to another folder with SONDE_DIR, or" in sonde("ui", "x", code=1).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "--nonsense"], "no option --nonsense. See  sonde list --help"),
        (["diagnose", "--tpye", "x"], 'no option --tpye. Did you mean "--type"? See  sonde diagnose --help'),
        (["show", "--at", "x"], 'invalid --at "x": it should be an integer. See  sonde show --help'),
        (["list", "-n", "0"], 'invalid --limit "0": it should be at least 1. See  sonde list --help'),
        (["show", "--at"], "--at needs a value. See  sonde show --help"),
        (["list", "--json=3"], "--json takes no value. See  sonde list --help"),
        (["show", "a", "b"], "unexpected argument: b. See  sonde show --help"),
        (["compare", "only-one"], "missing argument B. See  sonde compare --help"),
        (["train"], "no config file given. Create one:  sonde train --example > tune.yaml"),
    ],
)
def test_all_usage_errors_have_one_format(arguments: list[str], message: str, sonde: Any) -> None:
    assert sonde(*arguments, code=2).stderr == f"Error: {message}\n"


SOURCES = [path for room in ("read", "show", "tune") for path in (Path(library.__file__).parent / room).rglob("*.py")]
KEYWORDS = {
    name
    for function in (export_run, report_run, delete_run, library.ui, library.open, library.runs, TrainingWrapper)
    for name in inspect.signature(function).parameters
}
OPTION = re.compile(r"(?<![\w(-])--([a-z]+)\b(?![:-])|(?<= )-o\b")


def options_in(source: str) -> list[str]:
    """Options of commands in the strings of a source, except in a command that is written out."""
    nodes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    texts = [re.sub(r"sonde [a-z]+(?: [^ `.]+)*", "", text) for text in nodes if isinstance(text, str)]
    return [found[0] for text in texts for found in OPTION.finditer(text) if not found[1] or found[1] in KEYWORDS]


def test_messages_of_the_library_name_keywords_and_not_options() -> None:
    assert options_in('x = f"{y} exists; add --force"') == ["--force"]
    assert options_in('x = "choose another place with -o."') == ["-o"]
    assert not options_in('x = "Run `sonde export latest --force` or `sonde list --dir x`."')
    assert {path: named for path in SOURCES if (named := options_in(path.read_text(encoding="utf-8")))} == {}
