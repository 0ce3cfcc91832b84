"""The public functions: what they accept and refuse, in which words; the decorator; unmodified scripts."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.errors import NotAModelError, SessionError, SettingsError, SondeError, UsageError
from sonde.session import NullSession, Session, run_script


def train(model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("model", "optimizer", "says"),
    [
        ("a string", None, "takes a torch.nn.Module; got str"),
        (nn.Linear, None, "pass an instance"),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), None, "order is watch(model, optimizer)"),
        (nn.Linear(1, 1), "adam", "takes a torch optimizer"),
        ([nn.Linear(1, 1), nn.Linear(1, 1)], None, "takes one model; got a list of 2.*prefix="),
    ],
)
def test_wrong_types_are_refused_with_the_remedy(model: Any, optimizer: Any, says: str, begin: Any) -> None:
    with pytest.raises(NotAModelError, match=says.replace("(", r"\(").replace(")", r"\)")):
        begin().watch(model, optimizer)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"activations": "often"}, UsageError),
        ({"sites": 5}, UsageError),
        ({"sites": [5]}, UsageError),
        ({"budget": -1.0}, SettingsError),
        ({"snapshots": "often"}, UsageError),
        ({"snapshots": sonde.Snapshots(store="zar")}, UsageError),
    ],
)
def test_bad_options_are_refused_before_training(options: dict[str, Any], error: Any, begin: Any) -> None:
    with pytest.raises(error):
        begin().watch(nn.Linear(1, 1), **options)


def test_every_refuses_nonsense() -> None:
    with pytest.raises(UsageError, match="number of steps"):
        sonde.every(0)


def test_unknown_settings_name_the_nearest(begin: Any) -> None:
    with pytest.raises(SettingsError, match="hist_every"):
        begin(hist_evry=3)


def test_a_finished_session_refuses_to_watch_and_ignores_logs_with_one_warning(begin: Any, capfd: Any) -> None:
    session = begin()
    session.finish()
    with pytest.raises(SessionError, match="finished"):
        session.watch(nn.Linear(1, 1))
    for _ in range(3):
        session.log({"loss": 1.0})
    assert capfd.readouterr().err.count("after finish()") == 1


def test_logging_without_a_session_says_what_to_do() -> None:
    from sonde.session.entry import current

    current.use(None)
    with pytest.raises(SessionError, match=r"sonde\.init"):
        sonde.log({"loss": 1.0})


def test_watch_alone_begins_a_run_and_the_context_manager_ends_it(own_folder: Path) -> None:
    model = nn.Linear(2, 1)
    with sonde.watch(model) as session:
        train(model)
    run = sonde.open("latest")
    assert session.is_finished
    assert (run.status, run.project, run.last_step) == ("finished", "default", 2)


def test_log_takes_tensors_arrays_nested_names_and_leaves_out_the_rest(begin: Any, reopen: Any, capfd: Any) -> None:
    import numpy as np

    session = begin()
    loss = torch.tensor([2.0], requires_grad=True)
    odd = {"bad": "text", "big": torch.ones(2)}
    for _ in range(2):
        session.log({"loss": loss, "n": np.float32(1.5), "flag": True, "a": {"b": 3}, **odd})
    loss.data.fill_(9.0)  # what was logged was taken when it was logged
    rows = {row["name"]: row["value"] for row in reopen().scalars().to_pylist()}
    assert rows == {"loss": 2.0, "n": 1.5, "flag": 1.0, "a/b": 3.0}
    assert capfd.readouterr().err.count("log() did not record") == 2


@pytest.mark.parametrize(
    ("values", "step", "says"),
    [
        (None, None, "log() takes a mapping from names to numbers"),
        (0.5, None, "not 0.5"),
        ({"loss": 1.0}, "last", "log() takes a whole number as step=, not 'last'"),
        ({"loss": 1.0}, float("nan"), "not nan"),
        ({"loss": 1.0}, 10**30, "log() takes a whole number as step="),
        ({"loss": np.complex64(1j)}, None, 'log() did not record "loss": complex64'),
    ],
)
def test_what_log_cannot_record_warns_once_and_never_switches_sonde_off(
    values: Any, step: Any, says: str, begin: Any, reopen: Any, capfd: Any
) -> None:
    session = begin()
    for _ in range(2 * session.settings.max_errors):
        session.log(values, step)
    session.log({"after": 1})
    assert capfd.readouterr().err.count(says) == 1
    assert (session.recording.breaker.num_errors, session.recording.breaker.is_open) == (0, False)
    run = reopen()
    assert run.scalars("after").num_rows == 1
    assert "loss" not in run.scalars().column("name").to_pylist()


def test_warnings_about_names_that_change_every_step_come_to_an_end(begin: Any, capfd: Any) -> None:
    session = begin()
    for step in range(300):
        session.log({f"image {step}": "no number"})
    assert capfd.readouterr().err.count("log() did not record") == 100


def test_a_run_logged_by_another_count_is_resumed_at_the_step_it_had(begin: Any, reopen: Any) -> None:
    model = nn.Linear(2, 1)
    for resume in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = begin(name="samples", resume=resume)
        session.watch(model, optimizer)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            session.log({"loss": 0.5}, step=(3 * resume + step + 1) * 64)
        session.finish()
    run = reopen()
    assert run.stats("grad/bias/norm").column("step").to_pylist() == [0, 1, 2, 3, 4, 5]
    assert run.scalars("loss").column("step").to_pylist() == [64, 128, 192, 256, 320, 384]


def test_a_run_with_only_the_users_step_count_is_resumed_after_it(begin: Any) -> None:
    for resume, expected in ((False, 0), (True, 65)):
        session = begin(name="by hand", resume=resume)
        assert session.step_number == expected
        session.log({"loss": 0.5}, step=64)
        session.finish()


def test_non_finite_numbers_are_kept_as_they_are(begin: Any, reopen: Any) -> None:
    session = begin()
    session.log({"loss": float("nan"), "up": float("inf")})
    rows = {row["name"]: row["value"] for row in reopen().scalars().to_pylist()}
    assert rows["loss"] != rows["loss"]
    assert rows["up"] == float("inf")


def test_a_new_session_finishes_the_one_before(begin: Any, tmp_path: Path) -> None:
    first = begin(name="first")
    begin(name="second")
    assert first.is_finished
    assert {run.status for run in sonde.runs(tmp_path / "runs")} == {"finished", "running"}


def test_a_null_session_has_every_public_method_of_a_session() -> None:
    public = {name for name, _ in inspect.getmembers(Session, inspect.isfunction) if not name.startswith("_")}
    assert public == {"watch", "log", "tap", "batch", "snapshot", "step", "skip_step", "rewind", "flush", "finish"}
    assert public <= set(dir(NullSession))


def test_the_watch_contract_has_its_fixed_keywords() -> None:
    fixed = [
        "params",
        "grads",
        "updates",
        "optim",
        "activations",
        "activation_grads",
        "sites",
        "when",
        "budget",
        "snapshots",
    ]
    parameters = inspect.signature(Session.watch).parameters
    assert [name for name in fixed if name in parameters] == fixed
    public = dict(inspect.signature(sonde.watch).parameters)
    own = {name: parameter for name, parameter in parameters.items() if name != "self"}
    assert {n: p for n, p in public.items() if n in own} == own
    assert list(inspect.signature(sonde.init).parameters)[:7] == [
        "project",
        "name",
        "dir",
        "config",
        "tags",
        "notes",
        "resume",
    ]


def test_record_on_a_function_finds_the_models_trained_inside(begin: Any, own_folder: Path) -> None:
    @sonde.record(project="fn", verbose=False)
    def fit(steps: int) -> str:
        """Train."""
        train(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), steps)
        return "done"

    assert fit(4) == "done"
    assert fit.__doc__ == "Train."
    run = sonde.open("latest")
    assert (run.project, run.status) == ("fn", "finished")
    assert run.stats("grad/1.weight/n").num_rows == 4
    assert run.stats("act/0/n").column("step").to_pylist() == [0, 1, 2, 3]


def test_record_on_a_function_that_raises_is_a_crash(own_folder: Path) -> None:
    @sonde.record(project="fn", verbose=False)
    def fit() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fit()
    assert sonde.open("latest").status == "crashed"


def test_record_on_a_class_watches_instances_and_restores_it(begin: Any, reopen: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    original = Net.__init__
    begin()
    assert sonde.record(Net) is Net
    train(Net())
    run = reopen()
    assert run.stats("grad/fc.weight/n").num_rows == 3
    assert Net.__init__ is original


def test_record_on_a_model_gives_the_model_back(begin: Any, reopen: Any) -> None:
    begin()
    model = nn.Linear(2, 1)
    assert sonde.record(model) is model
    train(model)
    assert reopen().stats("update/weight/n").num_rows == 3


def test_record_refuses_what_it_cannot_record() -> None:
    with pytest.raises(NotAModelError, match="function, a model class or a model"):
        sonde.record(5)


SCRIPT = """
import sys
import torch
from torch import nn
from helper import WIDTH          # beside the script

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
    def forward(self, x):
        return self.body(x)

generator, critic = Net(), nn.Sequential(nn.Linear(WIDTH, 1))
optimizer = torch.optim.Adam([*generator.parameters(), *critic.parameters()])
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    critic(generator(torch.ones(1, WIDTH))).sum().backward()
    optimizer.step()
assert __name__ == "__main__"
ending = sys.argv[2]
if ending == "raise":
    raise RuntimeError("planted")
if ending == "exit":
    sys.exit(5)
"""


@pytest.mark.parametrize(
    ("ending", "code", "status"), [("", 0, "finished"), ("raise", 1, "crashed"), ("exit", 5, "crashed")]
)
def test_an_unmodified_script_is_watched(ending: str, code: int, status: str, own_folder: Path, capfd: Any) -> None:
    folder = own_folder / "elsewhere"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("WIDTH = 4")
    argv, path = sys.argv, list(sys.path)
    assert run_script(str(folder / "train.py"), ["3", ending]) == code
    assert (sys.argv, sys.path) == (argv, path)
    sys.modules.pop("helper", None)
    run = sonde.open("latest")
    assert (run.status, run.project) == (status, "train")
    assert run.stats("grad/body.weight/n").num_rows == 3
    assert run.stats("act/Sequential.0/n").num_rows == 3
    if ending == "raise":
        told = capfd.readouterr().err
        assert "planted" in told
        assert "runpy" not in told


def test_a_missing_script_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match="no script"):
        run_script("nowhere.py", [])


def test_the_runs_folder_must_be_a_folder(begin: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SondeError, match="file"):
        sonde.init(dir=tmp_path / "file")


def test_facts_of_the_run_are_kept(begin: Any, reopen: Any) -> None:
    begin(name="named", config={"lr": 0.1, "deep": {"a": [1, 2]}}, tags=["x"], notes="a note")
    run = reopen()
    assert (run.name, dict(run.config)["deep"], list(run.tags), run.notes) == ("named", {"a": [1, 2]}, ["x"], "a note")
    assert run.environment["python"]


def test_the_budget_thins_recording_once_its_seconds_are_used_and_says_so(begin: Any, reopen: Any) -> None:
    model = nn.Linear(2, 1)
    session = begin(budget=0.01, budget_seconds=600)
    session.watch(model)
    train(model, 60)
    session.recording.ledger.spend("compiling", 500.0)
    train(model, 340)
    run = reopen()
    steps = run.stats("grad/weight/n").column("step").to_pylist()
    assert steps[:60] == list(range(60))
    assert len(steps) < 300
    assert "cadence" in run.events().column("type").to_pylist()


def test_sites_that_match_nothing_are_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with sonde.init(dir=tmp_path) as session:
        session.watch(model, sites="layers.*")
    assert "sites='layers.*' matches no layer of this model" in capsys.readouterr().err
    with sonde.init(dir=tmp_path) as session:
        session.watch(model, sites="1")
    assert "matches no layer" not in capsys.readouterr().err
