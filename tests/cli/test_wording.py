"""Errors name what the command line has: options, or else variables; and click's errors look like ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sonde.cli.main import VERBS, _options
from sonde.cli.output import in_options
from sonde.config import Settings, ordered_names, variable_of

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
        (["list", "--nonsense"], "no such option: --nonsense. See  sonde list --help"),
        (["show", "--at", "x"], "invalid value for '--at': it should be a valid integer. See  sonde show --help"),
        (["compare", "only-one"], "missing argument 'B'. See  sonde compare --help"),
        (["train"], "no config file given. Create one:  sonde train --example > tune.yaml"),
    ],
)
def test_all_usage_errors_have_one_format(arguments: list[str], message: str, sonde: Any) -> None:
    assert sonde(*arguments, code=2).stderr == f"Error: {message}\n"
