"""Invalid arguments are refused before a run exists: no folder and no empty, crashed run is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import sonde
from sonde.errors import SondeError, UsageError
from sonde.session.entry import current

HIDDEN = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(name, name=name.split(".")[0])

sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {packages!r} else found(name, package)
"""

PROGRAM = """
import sonde, torch
model = torch.nn.Linear(2, 2)
{call}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(current, "_current", None)


def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


class Duck:
    """Looks like an optimizer."""

    def step(self) -> None: ...


def wrong(**keywords: Any) -> Callable[[], object]:
    return lambda: sonde.watch(model(), **keywords)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "unknown keyword": (wrong(activatons=False), 'Did you mean "activations"'),
    "unknown run keyword": (wrong(projct="gpt"), 'Did you mean "project"'),
    "schedule": (wrong(grads="often"), "grads= must be"),
    "sites": (wrong(sites=3), "sites= must be"),
    "budget": (wrong(budget=7), "budget"),
    "setting": (wrong(hist_every=0), "hist_every"),
    "log": (wrong(log="everything"), "log= must be"),
    "config": (wrong(config=3), "config= must be"),
    "mirror": (wrong(mirror="wandbb"), 'Did you mean "wandb"'),
    "snapshots": (wrong(snapshots="zarr"), "snapshots= must be"),
    "store": (wrong(snapshots=sonde.Snapshots(store="zar")), 'Did you mean "zarr"'),
    "store option": (wrong(snapshots=sonde.Snapshots(options={"compresion": "zstd"})), 'Did you mean "compression"'),
    "store value": (wrong(snapshots=sonde.Snapshots(options={"compression": "zip"})), "Known: auto"),
    "model": (lambda: sonde.watch("model"), "takes a torch.nn.Module"),  # type: ignore[arg-type]
    "duck-typed optimizer": (lambda: sonde.watch(model(), cast(Any, Duck())), "call sonde.step() after"),
    "optimizer": (lambda: sonde.watch(model(), "adam"), "takes a torch optimizer"),  # type: ignore[arg-type]
    "size": (wrong(snapshots=True, snapshot_mib=1e-6), "snapshot_mib="),
    "init": (lambda: sonde.init(projct="gpt"), 'no setting "projct"'),  # type: ignore[call-arg]
    "record": (lambda: sonde.record(model(), projct="gpt"), 'Did you mean "project"'),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_leave_no_run(name: str, tmp_path: Path) -> None:
    call, remedy = REFUSED[name]
    with pytest.raises(SondeError) as refused:
        call()
    assert remedy in str(refused.value)
    assert not list(Path("runs").glob("*/*/run.json"))
    if name != "size":  # which is known only once the memory for snapshots is reserved
        assert list(tmp_path.iterdir()) == []


def test_unreadable_settings_leave_no_run(tmp_path: Path) -> None:
    Path("sonde.yaml").write_text("budget: [")
    with pytest.raises(SondeError, match="not valid YAML"):
        sonde.watch(model())
    assert [path.name for path in tmp_path.iterdir()] == ["sonde.yaml"]


def program(call: str, *packages: str) -> str:
    """What a program that ends with this call prints."""
    code = HIDDEN.format(packages=packages) + PROGRAM.format(call=call)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    return ended.stderr


@pytest.mark.parametrize(
    ("store", "package"), [("zarr", "numcodecs"), ("icechunk", "icechunk"), ("s3://bucket/runs", "icechunk")]
)
def test_a_missing_extra_leaves_no_run(store: str, package: str, tmp_path: Path) -> None:
    said = program(f"sonde.watch(model, snapshots=sonde.Snapshots(store={store!r}))", package)
    assert f"needs {package}, which is not installed. Run:  pip install 'sonde-ml[tensors]'" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "call",
    [
        "sonde.init().watch(model, activatons=False)",
        "with sonde.init() as session: session.watch(model, snapshots='zarr')",
        "sonde.init(); sonde.watch(model, grads='often')",
    ],
)
def test_a_refused_watch_of_an_empty_run_removes_the_run(call: str, tmp_path: Path) -> None:
    assert "Error: " in program(call)
    assert not list(tmp_path.glob("runs/*/*/run.json"))


def test_a_refused_watch_keeps_a_run_with_data(tmp_path: Path) -> None:
    program("sonde.init(); sonde.log({'loss': 1.0}); sonde.watch(model, activatons=False)")
    (run,) = sonde.runs("runs")
    assert (run.status, run.scalars("loss").num_rows) == ("crashed", 1)


def test_a_refused_watch_keeps_a_resumed_run(tmp_path: Path) -> None:
    with sonde.init(project="p"):
        sonde.log({"loss": 1.0})
    program("sonde.watch(model, project='p', resume=True, snapshots=True, snapshot_mib=1e-6)")
    (run,) = sonde.runs("runs")
    assert run.scalars("loss").num_rows == 1


def test_a_program_that_corrects_its_call_keeps_the_run() -> None:
    session = sonde.init()
    with pytest.raises(UsageError):
        session.watch(model(), activatons=False)  # type: ignore[call-arg]
    session.watch(model())
    session.step()
    session.finish("crashed")
    assert len(sonde.runs("runs")) == 1


def test_disabled_refuses_nothing() -> None:
    assert "Null" in repr(sonde.watch(model(), grads="often", mode="disabled"))  # type: ignore[arg-type]


def test_trainers_refuse_when_they_are_set_up(tmp_path: Path) -> None:
    from sonde.adapters.accelerate import SondeTracker
    from sonde.adapters.transformers import SondeCallback

    calls: list[Callable[[], object]] = [
        lambda: SondeTracker(projct="gpt"),  # type: ignore[call-arg]
        lambda: SondeCallback(budget=7),
        lambda: SondeCallback(watch={"activatons": False}),  # type: ignore[typeddict-unknown-key]
    ]
    for call in calls:
        with pytest.raises(SondeError):
            call()
    assert list(tmp_path.iterdir()) == []


class TestWatchIsInitAndWatchInOne:
    def test_it_describes_the_run(self) -> None:
        with sonde.watch(
            model(), project="gpt", name="a", config={"lr": 0.1}, tags=["x"], notes="n", hist_every=3, budget=None
        ) as session:
            assert isinstance(session, sonde.Session)
            assert (session.settings.hist_every, session.settings.budget) == (3, None)
        run = sonde.open("gpt/a", dir="runs")
        assert (run.config, run.tags, run.notes) == ({"lr": 0.1}, ("x",), "n")

    def test_the_same_description_continues_the_run(self) -> None:
        first = sonde.watch(model(), project="gan", config={"lr": 0.1})
        second = sonde.watch(model(), project="gan", prefix="critic.")
        assert first is second
        sonde.finish()

    def test_another_description_starts_another_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        first = sonde.watch(model(), name="a")
        second = sonde.watch(model(), name="b")
        assert first is not second
        assert first.is_finished
        assert "the previous one was finished" in capsys.readouterr().err
        sonde.finish()

    def test_none_is_a_value_of_init_too(self) -> None:
        with sonde.init(budget=None, project=None) as session:
            assert isinstance(session, sonde.Session)
            assert session.settings.budget is None
