"""`sonde run` of scripts that use sonde themselves: what they say holds, unless the command line says otherwise."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

import sonde
from sonde.errors import RunError, SettingsError, UsageError
from sonde.session import run_script

TRAIN = """
import torch
import sonde
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(steps=3, model=model, optimizer=optimizer):
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def run(body: str, **options: Any) -> list[Any]:
    """The runs that `sonde run` of a script makes, oldest first."""
    Path("train.py").write_text(TRAIN + textwrap.dedent(body))
    assert run_script("train.py", [], **options) == 0
    return list(reversed(sonde.runs()))


INIT = 'sonde.init(project="p", name="n", config={"lr": 0.1}, tags=["a"], notes="why", hist_every=3)\n'


def test_what_the_script_says_holds() -> None:
    (found,) = run(INIT + "train()")
    assert (found.project, found.name, found.config, found.tags, found.notes) == ("p", "n", {"lr": 0.1}, ("a",), "why")
    assert found.path.parent.name == "p"
    steps = found.stats("grad/weight/n").column("step").to_pylist()
    assert steps == [0, 1, 2]
    assert found.status == "finished"


def test_the_command_line_wins_and_says_what_it_replaced() -> None:
    (found,) = run(INIT + "train()", project="q", name="m", tags=("b",), notes="because", budget=0.5)
    assert (found.project, found.name, found.config, found.notes) == ("q", "m", {"lr": 0.1}, "because")
    assert found.tags == ("a", "b")
    (said,) = [event["message"] for event in found.events().to_pylist() if event["type"] == "command_line"]
    assert all(part in said for part in ("project='p'", "name='n'", "notes='why'"))


def test_settings_of_the_script_hold() -> None:
    run('sonde.init(dir="elsewhere", mode="enabled")\ntrain()')
    (found,) = sonde.runs("elsewhere")
    assert found.project == "train"  # neither said: the script's name
    assert not Path("runs").exists()


def test_a_script_that_disables_sonde_is_not_recorded() -> None:
    assert run('sonde.init(mode="disabled")\ntrain()') == []


@pytest.mark.parametrize("source", ["variable", "file"])
def test_variables_and_files_come_before_the_name_of_the_script(source: str, monkeypatch: Any) -> None:
    if source == "variable":
        monkeypatch.setenv("SONDE_PROJECT", "set")
    else:
        Path("sonde.yaml").write_text("project: set\n")
    assert [found.project for found in run("train()")] == ["set"]
    assert [found.project for found in run("train()", project="q")][-1] == "q"


def test_a_folder_is_that_of_the_command_whatever_the_script_does() -> None:
    here = Path.cwd()
    Path("deep").mkdir()
    try:
        run('import os; os.chdir("deep")\ntrain()')
    finally:
        os.chdir(here)
    assert len(sonde.runs(here / "runs")) == 1


def test_wrong_options_are_refused_before_the_script_runs() -> None:
    with pytest.raises(SettingsError, match="budget"):
        run('open("ran", "w")', budget=7.0)
    assert not Path("ran").exists()


def test_keywords_of_watch_hold() -> None:
    (found,) = run("sonde.watch(model, optimizer, grads=False, updates=False)\ntrain()")
    assert found.stats("param/weight/n").num_rows == 3
    assert found.sites("grad").num_rows == 0
    assert found.sites("param").num_rows == 2


def test_a_script_that_watches_one_model_says_which() -> None:
    (found,) = run(
        """
        other = torch.nn.Linear(2, 1)
        second = torch.optim.SGD(other.parameters(), lr=0.01)
        with sonde.init() as session:
            session.watch(model, optimizer)
            train()
            train(2, other, second)
        """
    )
    assert set(found.sites("param")["site"].to_pylist()) == {"weight", "bias"}
    assert found.last_step == 2


def test_a_call_before_init_leaves_no_run_behind() -> None:
    (found,) = run("model(torch.ones(1, 2))  # shapes\n" + INIT + "train()")
    assert (found.project, found.name, found.last_step) == ("p", "n", 2)
    assert os.path.realpath("runs/latest") == str(found.path)


def test_a_call_before_watch_does_not_clash() -> None:
    (found,) = run(
        """
        shapes = torch.nn.Linear(2, 1)
        shapes(torch.ones(1, 2))
        sonde.watch(model, optimizer)
        train()
        """
    )
    assert found.stats("grad/weight/n").num_rows == 3


def test_several_runs_of_one_script_are_several() -> None:
    first, second = run(
        """
        for name in ("one", "two"):
            with sonde.init(name=name):
                train()
        """
    )
    assert [(r.name, r.last_step, r.status) for r in (first, second)] == [
        ("one", 2, "finished"),
        ("two", 2, "finished"),
    ]
    assert second.stats("grad/weight/n").num_rows == 3


def test_finish_ends_the_run_and_what_follows_is_not_recorded() -> None:
    (found,) = run("train()\nsonde.finish()\ntrain(9)")
    assert (found.last_step, found.status) == (2, "finished")


def test_training_before_init_is_a_separate_run() -> None:
    first, second = run("train(4)\n" + INIT + "train(2)")
    assert [(r.project, r.last_step) for r in (first, second)] == [("train", 3), ("p", 1)]


def test_log_without_init_is_recorded() -> None:
    (found,) = run('sonde.log({"loss": 1.0})\ntrain()')
    assert found.scalars("loss")["value"].to_pylist() == [1.0]


def test_options_of_a_trainers_callback_hold() -> None:
    (found,) = run(
        """
        from sonde.session.entry.trainer import TrainerSession
        model(torch.ones(1, 2))
        joining = TrainerSession(None, {"project": "p", "name": "n"})
        joining.begin({"lr": 0.1}).watch(model, optimizer)
        train()
        joining.end()
        """,
        name="m",
    )
    assert (found.project, found.name, found.config, found.last_step) == ("p", "m", {"lr": 0.1}, 2)


def test_a_decorated_function_is_one_run_with_its_options() -> None:
    (found,) = run(
        """
        @sonde.record(name="decorated", tags=["d"])
        def fit():
            train()
        fit()
        """,
        tags=("b",),
    )
    assert (found.project, found.name, found.tags, found.last_step) == ("fit", "decorated", ("d", "b"), 2)


def test_a_decorated_function_is_in_the_project_that_a_variable_names(monkeypatch: Any) -> None:
    monkeypatch.setenv("SONDE_PROJECT", "set")

    @sonde.record
    def fit() -> None: ...

    fit()
    assert sonde.open("latest").project == "set"


def test_a_script_without_a_model_leaves_nothing_behind(capfd: Any) -> None:
    assert run("") == []
    assert "Nothing was recorded: train.py trained no model." in capfd.readouterr().err
    assert not Path("runs").exists()


def test_a_model_that_is_only_called_leaves_nothing_behind(capfd: Any) -> None:
    assert run("for _ in range(3): model(torch.ones(1, 2))") == []
    assert "Nothing was recorded: train.py trained no model." in capfd.readouterr().err
    assert not Path("runs").exists()


def test_an_empty_run_gives_latest_back_to_the_one_before() -> None:
    (first,) = run("train()", project="one")
    (still,) = run("model(torch.ones(1, 2))", project="two")
    assert still.path == first.path == sonde.open("latest").path
    assert sorted(path.name for path in Path("runs").iterdir()) == ["latest", "one"]


def test_training_without_an_optimizer_is_kept() -> None:
    (found,) = run("model(torch.ones(1, 2)).sum().backward()")
    assert found.scalars("data/loss/train").num_rows == 1


@pytest.mark.parametrize("body", ["import nosuchmodule", "def f(:"])
def test_a_script_that_fails_before_it_trains_leaves_nothing_behind(body: str, capfd: Any) -> None:
    Path("train.py").write_text(body)
    assert run_script("train.py", []) == 1
    told = capfd.readouterr().err
    assert "Error" in told
    assert "session/entry/script.py" not in told
    assert "Nothing was recorded: train.py ended before it trained a model." in told
    assert not Path("runs").exists()


@pytest.mark.parametrize("module", ["nosuch", "nosuch.train", "json.nosuch", "json"])
def test_a_module_that_cannot_run_is_a_usage_error(module: str) -> None:
    with pytest.raises(UsageError, match=f"cannot run -m {module}: .*'?{module}"):
        run_script(module, [], is_module=True)
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_used_is_refused_before_the_script_runs() -> None:
    Path("runs").write_text("a file")
    with pytest.raises(RunError, match="A file is in the way"):
        run('open("ran", "w")')
    assert not Path("ran").exists()


def test_a_run_that_cannot_begin_does_not_end_the_script(capfd: Any) -> None:
    Path("train.py").write_text(TRAIN + "open('runs', 'w').close()\ntrain()\nprint('trained')")
    assert run_script("train.py", []) == 0
    told = capfd.readouterr()
    assert told.out == "trained\n"
    assert "the script is not recorded" in told.err


WHOLE = {"snapshots": "{when: every(2), kinds: 'param,grad', options: {compression: none}}", "sites": "[weight]"}


def test_the_command_line_can_ask_for_all_that_watch_can() -> None:
    (found,) = run("sonde.init()\nsonde.watch(model, snapshots=False, grads=False)\ntrain(3)", record=WHOLE)
    assert found.tensors.snapshots()["step"].to_pylist() == [0, 2]
    assert sorted(found.tensors.snapshot(0)) == ["grad/weight", "param/weight"]
    assert set(found.sites()["kind"].to_pylist()) & {"param", "grad"} == {"param"}  # what it does not say, holds


@pytest.mark.parametrize("where", ["file", "variables", "init"])
def test_a_setting_says_what_is_recorded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = "sonde.init()\n"
    if where == "file":
        Path("sonde.yaml").write_text(
            "record:\n  sites: weight\n  params: first(1) | every(2)\n  snapshots: {when: 2, kinds: [param]}\n"
        )
    elif where == "variables":
        monkeypatch.setenv("SONDE_RECORD__SITES", "weight")
        monkeypatch.setenv("SONDE_RECORD__PARAMS", "first(1) | every(2)")
        monkeypatch.setenv("SONDE_RECORD__SNAPSHOTS", "{when: 2, kinds: [param]}")
    else:
        begin = (
            'sonde.init(record={"sites": "weight", "params": sonde.every(2), "snapshots": sonde.Snapshots(when=2)})\n'
        )
    (found,) = run(f"{begin}train(4)")  # no model is named
    assert found.tensors.snapshots()["step"].to_pylist() == [0, 2]
    assert list(found.tensors.snapshot(0)) == ["param/weight"]
    assert found.stats("param/weight/norm")["step"].to_pylist() == [0, 2]


def test_a_decorator_can_ask_for_all_that_watch_can() -> None:
    import torch

    @sonde.record(snapshots=sonde.Snapshots(when=2, kinds="grad"), sites="*.weight", params=False, hist_every=3)
    def train() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    found = sonde.open("latest")
    assert found.tensors.snapshots()["step"].to_pylist() == [0, 2]
    assert list(found.tensors.snapshot(0)) == ["grad/0.weight"]
    assert found.stats("param/0.weight/norm").num_rows == 0
    model = sonde.record(torch.nn.Linear(2, 1), snapshots=True, project="one", activations=False)
    sonde.finish()
    assert isinstance(model, torch.nn.Linear)
    with pytest.raises(UsageError, match="snapshot"):
        sonde.record(torch.nn.Linear(2, 1), snapshot=True)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"activations": "evry(3)"}, "is not a schedule"),
        ({"snapshots": "{whn: 3}"}, 'no "whn"'),
        ({"snapshots": "{when: each(3)}"}, "is not a schedule"),
        ({"snapshot": "3"}, 'Did you mean "record.snapshots"'),
    ],
)
def test_wrong_text_is_refused_before_the_script_runs(record: dict[str, str], says: str) -> None:
    Path("train.py").write_text("open('ran', 'w')")
    with pytest.raises((UsageError, SettingsError), match=says):
        run_script("train.py", [], record=record)
    assert not Path("ran").exists()
