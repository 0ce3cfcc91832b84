"""Settings come from four places, the nearest wins, and a typo is answered with the name that was meant."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from pydantic import ValidationError

from sonde.config import Settings, WriterSettings
from sonde.errors import SettingsError, UnknownNameError


@pytest.fixture(autouse=True)
def seconds_to_spend() -> None:
    """No variable is set here."""


def write(text: str, path: str = "sonde.yaml") -> Path:
    Path(path).write_text(text, encoding="utf-8")
    return Path(path)


def test_defaults_need_nothing() -> None:
    settings = Settings.load()
    assert (settings.dir, settings.project, settings.mode, settings.budget) == (
        Path("runs"),
        "default",
        "enabled",
        0.01,
    )
    assert {setting.origin for setting in settings.explain()} == {"default"}


def test_keyword_beats_variable_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    write("project: file\nbudget_seconds: 1\nhist_every: 1\n")
    monkeypatch.setenv("SONDE_BUDGET_SECONDS", "2")
    monkeypatch.setenv("SONDE_HIST_EVERY", "2")
    settings = Settings.load(hist_every=3)
    assert (settings.project, settings.budget_seconds, settings.hist_every, settings.max_errors) == ("file", 2, 3, 10)
    origins = [settings.origin(name) for name in ("project", "budget_seconds", "hist_every", "max_errors")]
    assert origins == [f"file {Path('sonde.yaml').absolute()}", "env SONDE_BUDGET_SECONDS", "keyword", "default"]


def test_nested_settings_merge_key_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    write("writer:\n  flush_mib: 2\n  seal_steps: 8\n")
    monkeypatch.setenv("SONDE_WRITER__SEAL_STEPS", "16")
    settings = Settings.load(writer={"queue_mib": 3})
    assert settings.writer == WriterSettings(flush_mib=2, seal_steps=16, queue_mib=3)
    assert settings.origin("writer.flush_mib") == f"file {Path('sonde.yaml').absolute()}"
    assert settings.origin("writer.seal_steps") == "env SONDE_WRITER__SEAL_STEPS"
    assert settings.origin("writer.queue_mib") == "keyword"
    assert settings.origin("writer.seal_mib") == "default"


def test_named_file_is_read_in_place_of_the_default_one(monkeypatch: pytest.MonkeyPatch) -> None:
    write("project: nearby\n")
    monkeypatch.setenv("SONDE_CONFIG", str(write("budget: 0.5\n", "other.yaml")))
    settings = Settings.load()
    assert (settings.project, settings.budget, settings.origin("budget")) == (
        "default",
        0.5,
        f"file {Path('other.yaml').absolute()}",
    )


def test_settings_are_changed_without_reading_files_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write("project: here\n")
    settings = Settings.load(budget_seconds=5)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write("project: there\n")
    changed = settings.changed(budget="none")
    assert (changed.project, changed.budget_seconds, changed.budget) == ("here", 5, None)
    assert [changed.origin(name) for name in ("project", "budget_seconds", "budget", "max_errors")] == [
        f"file {tmp_path / 'sonde.yaml'}",
        "keyword",
        "keyword",
        "default",
    ]
    with pytest.raises(SettingsError, match="budget"):
        settings.changed(budget=-1)


def test_an_unknown_home_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert Settings.load().dir == Path("runs")
    with pytest.raises(SettingsError, match=r"HOME is not set.*SONDE_DIR"):
        Settings.load(dir="~/runs")


def test_several_named_files_merge_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    write("project: a\nwriter: {flush_mib: 2, seal_mib: 2}\n", "a.yaml")
    write("writer: {seal_mib: 3}\n", "b.yaml")
    monkeypatch.setenv("SONDE_CONFIG", "a.yaml:b.yaml")
    settings = Settings.load()
    assert (settings.project, settings.writer.flush_mib, settings.writer.seal_mib) == ("a", 2, 3)
    assert settings.origin("writer.seal_mib") == f"file {Path('b.yaml').absolute()}"


def test_named_file_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_CONFIG", "nowhere.yaml")
    with pytest.raises(SettingsError, match=r"nowhere\.yaml, which does not exist"):
        Settings.load()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "not valid YAML"),
        ("- 1\n- 2\n", "contains a list"),
        ("just words\n", "contains a str"),
    ],
)
def test_file_that_is_not_a_mapping_is_an_error(text: str, message: str) -> None:
    write(text)
    with pytest.raises(SettingsError, match=message):
        Settings.load()


def test_file_that_is_not_text_is_an_error() -> None:
    Path("sonde.yaml").write_bytes(b"\xff\xfe\x00project")
    with pytest.raises(SettingsError, match="cannot read the settings file"):
        Settings.load()


def test_empty_file_changes_nothing() -> None:
    write("# nothing yet\n")
    assert {setting.origin for setting in Settings.load().explain()} == {"default"}


@pytest.mark.parametrize("key", ["bugdet", "Budget", "budget_"])
def test_unknown_key_in_file_is_answered_with_the_nearest(key: str) -> None:
    write(f"{key}: 0.5\n")
    with pytest.raises(SettingsError, match=rf'"{key}" \(in .*sonde\.yaml\)\. Did you mean "budget"'):
        Settings.load()


def test_unknown_nested_key_in_file_is_answered_with_the_nearest() -> None:
    write("writer:\n  flush_mb: 1\n")
    with pytest.raises(SettingsError, match=r'"writer\.flush_mb".* Did you mean "writer\.flush_mib"'):
        Settings.load()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("SONDE_BUGDET", "SONDE_BUDGET"),
        ("SONDE_WRITER__FLUSH_MB", "SONDE_WRITER__FLUSH_MIB"),
        ("SONDE_DIRS", "SONDE_DIR"),
    ],
)
def test_unknown_variable_is_answered_with_the_nearest(
    variable: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=f'"{variable}".*Did you mean "{meant}"'):
        Settings.load()


def test_unknown_keyword_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r'"hist_evry" \(given as a keyword\)\. Did you mean "hist_every"'):
        Settings.load(hist_evry=3)


def test_name_near_to_nothing_is_answered_with_all_names() -> None:
    known = r"Known: activation_rows, budget, budget_seconds, check_finite, dir, .*writer\.system_interval_s"
    with pytest.raises(SettingsError, match=known):
        Settings.load(xyzzy=3)


def test_variables_for_tests_and_other_programs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_TEST_ANYTHING", "1")
    monkeypatch.setenv("SONDE_DEBUG", "1")
    monkeypatch.setenv("SONDELIKE", "1")
    assert Settings.load().mode == "enabled"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget", 0),
        ("budget", 1.5),
        ("budget", "fast"),
        ("budget", float("nan")),
        ("mode", "active"),
        ("project", ""),
        ("hist_every", 0),
        ("max_errors", 1.5),
        ("exit_deadline_s", float("inf")),
        ("verbose", "perhaps"),
        ("writer", 3),
        ("writer", {"flush_interval_s": -1}),
    ],
)
def test_bad_value_is_refused_with_its_name_and_origin(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"{name}[a-z_.]*= is "):
        Settings.load(**{name: value})


def test_bad_choice_is_answered_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match='Did you mean "disabled"'):
        Settings.load(mode="disable")


def test_bad_value_in_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_WRITER__SEAL_STEPS", "many")
    with pytest.raises(SettingsError, match="SONDE_WRITER__SEAL_STEPS is 'many'"):
        Settings.load()


def test_group_as_json_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_WRITER", '{"flush_mib": 2}')
    assert Settings.load().writer.flush_mib == 2
    monkeypatch.setenv("SONDE_WRITER", "{flush")
    with pytest.raises(SettingsError, match="SONDE_WRITER is not a JSON object"):
        Settings.load()


@pytest.mark.parametrize(
    ("word", "mode"), [("on", "enabled"), ("off", "disabled"), ("enabled", "enabled"), ("disabled", "disabled")]
)
def test_yaml_words_for_the_mode_mean_what_they_say(word: str, mode: str) -> None:
    write(f"mode: {word}\n")  # YAML reads a bare `on` as true
    assert Settings.load().mode == mode


def test_budget_can_be_lifted_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load(budget=None).budget is None
    monkeypatch.setenv("SONDE_BUDGET", "none")
    assert Settings.load().budget is None


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_DIR", "")
    assert Settings.load().origin("dir") == "default"


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings.load(dir="~/runs").dir == tmp_path / "runs"


def test_settings_are_frozen_and_travel() -> None:
    settings = Settings.load(budget=0.5)
    with pytest.raises(ValidationError):
        settings.budget = 0.1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.writer.flush_mib = 1.0  # type: ignore[misc]
    for twin in (copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
        assert twin == settings
        assert twin.origin("budget") == "keyword"


def test_origin_of_an_unknown_setting_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match='Did you mean "budget"'):
        Settings.load().origin("budgte")


def test_every_setting_says_what_it_means() -> None:
    assert all(setting.meaning.endswith(".") for setting in Settings.load().explain())
    assert not any("\n" in setting.meaning for setting in Settings.load().explain())  # it is a cell of a table


def test_a_writer_model_may_be_given_whole() -> None:
    assert Settings.load(writer=WriterSettings(seal_steps=5)).writer.seal_steps == 5
