"""The public surface as users' tools see it: type checkers, `help()`, completion, and imports in the documentation."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest
from typer.main import get_command

import sonde
from sonde.cli.main import app
from sonde.config import RecordingSettings, RecordSettings, SettingKeywords, Settings, WriterSettings
from sonde.session import keywords
from sonde.session.keywords import DEFAULTS, IN_PYTHON_ONLY, RunKeywords, WatchKeywords, WatchRunKeywords
from sonde.session.null import NullSession
from sonde.session.ranks.other_rank import RankSession

ROOT = Path(__file__).parents[1]

SAMPLE = """
import torch
from torch import nn
import sonde
from sonde.adapters.accelerate import SondeTracker

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# right
session = sonde.watch(
    model, optimizer, project="gpt", name="a", config={"lr": 0.1}, tags=["x"], notes="n", budget=None,
    activations=sonde.every(10), grads=5, sites=["layers.*", nn.Linear], when=lambda step: step < 3,
    snapshots=sonde.Snapshots(when=10), mirror="wandb", hist_every=5, writer={"flush_mib": 2.0}, log="all",
)
sonde.init("gpt", config={"lr": 0.1}, budget=0.02).watch(model, [optimizer], activations="in-graph")
SondeTracker(project="gpt", verbose=False).watch(model, optimizer, params=False)
@sonde.record(project="gpt")
def train(lr: float) -> int: return 1
@sonde.record
class Net(nn.Module): ...
sonde.Settings.load(budget=0.5).changed(budget_seconds=3)
reveal_type(session)  # sonde.session.session.Session | sonde.session.null.NullSession
reveal_type(train)  # def (lr: float) -> int
reveal_type(Net())  # Net
reveal_type(sonde.record(model))  # Linear
reveal_type(sonde.flow.FlowAnalyzer)  # FlowAnalyzer
reveal_type(sonde.tune.CheckpointManager)  # CheckpointManager
reveal_type(sonde.testing.StoreTests)  # StoreTests
reveal_type(sonde.jax.step)  # **scalars
reveal_type(sonde.open("latest").tensors)  # RunTensors

# wrong
sonde.watch(model, activatons=False)  # error: activatons
sonde.watch(model, grads="often")  # error: grads
sonde.watch("model")  # error: Argument 1
sonde.watch(model, project=3)  # error: project
sonde.watch(model, snapshots="zarr")  # error: snapshots
sonde.init(projekt="gpt")  # error: projekt
sonde.init(budget="all")  # error: budget
sonde.init().watch(model, project="gpt")  # error: project
sonde.record(projekt="gpt")  # error: projekt
SondeTracker(projekt="gpt")  # error: projekt
sonde.Settings.load(budgte=0.5)  # error: budgte
"""

# Packages that mypy would read for minutes, and that the sample does not touch.
LARGE = (
    "accelerate",
    "datasets",
    "flax",
    "jax",
    "keras",
    "optax",
    "peft",
    "pyarrow",
    "tensorflow",
    "transformers",
    "trl",
)
MYPY = """
[mypy]
strict = true
follow_imports = silent
ignore_missing_imports = true
mypy_path = {src}
[mypy-{skipped}]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def mypy_says(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The messages of mypy about SAMPLE, by line."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "sample.py").write_text(SAMPLE)
    (folder / "mypy.ini").write_text(MYPY.format(src=ROOT / "src", skipped=",".join(f"{name}.*" for name in LARGE)))
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "sample.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    said: dict[int, str] = {}
    for line in found.stdout.splitlines():
        place, _, message = line.partition(": ")
        if place.startswith("sample.py:"):
            number = int(place.split(":")[1])
            said[number] = f"{said.get(number, '')} {message}"
    assert said, found.stdout + found.stderr
    return said


@pytest.mark.slow
@pytest.mark.timeout(900)  # mypy reads torch without a cache
def test_type_checkers_accept_what_works_and_refuse_what_does_not(mypy_says: dict[int, str]) -> None:
    lines = dict(enumerate(SAMPLE.splitlines(), 1))
    expected = {number: line.partition("  # ")[2] for number, line in lines.items() if "  # " in line}
    surprises = {
        lines[number]: said
        for number in lines
        if not is_as_expected(expected.get(number, ""), said := mypy_says.get(number, ""))
    }
    assert surprises == {}


def is_as_expected(text: str, said: str) -> bool:
    if not text:
        return not said
    kind = "error" if text.startswith("error: ") else "note"
    return f"{kind}: " in said and text.removeprefix("error: ") in said


def test_keywords_are_those_of_the_settings() -> None:
    assert list(SettingKeywords.__annotations__) == [*RecordingSettings.__annotations__, "dir", "project"]
    types = get_type_hints(SettingKeywords)
    for name, field in Settings.model_fields.items():
        wider = {"dir": "str | os.PathLike[str]", "writer": WriterSettings | Any, "record": RecordSettings | Any}
        assert name in wider or types[name] == field.annotation, name
    assert types.keys() == Settings.model_fields.keys()


def test_every_keyword_has_a_default() -> None:
    assert DEFAULTS.keys() == WatchRunKeywords.__annotations__.keys()


def test_files_and_the_command_line_can_ask_for_everything_that_watch_can() -> None:
    assert RecordSettings.model_fields.keys() == WatchKeywords.__annotations__.keys() - IN_PYTHON_ONLY
    assert WatchKeywords.__annotations__.keys() >= IN_PYTHON_ONLY
    assert "--record" in {
        option for parameter in cast(Any, get_command(app)).commands["run"].params for option in parameter.opts
    }


TAKES: list[tuple[Callable[..., Any], Any]] = [
    (sonde.watch, WatchRunKeywords),
    (sonde.Session.watch, WatchKeywords),
    (NullSession.watch, WatchKeywords),
    (RankSession.watch, WatchKeywords),
    (sonde.init, RunKeywords),
    (sonde.record, WatchRunKeywords),
]


def callbacks() -> list[tuple[Callable[..., Any], Any]]:
    from sonde.adapters import accelerate, keras, lightning, transformers

    named = (transformers.SondeCallback, lightning.SondeCallback, accelerate.SondeTracker, keras.SondeCallback)
    return [*((one, RunKeywords) for one in named), (accelerate.SondeTracker.watch, WatchKeywords)]


@pytest.mark.parametrize(
    ("function", "taken"), [*TAKES, *callbacks()], ids=lambda one: getattr(one, "__qualname__", "")
)
def test_signature_and_help_list_every_keyword(function: Callable[..., Any], taken: Any) -> None:
    shown = inspect.signature(function).parameters
    assert taken.__annotations__.keys() <= shown.keys()
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
    text = pydoc.plain(pydoc.render_doc(function))
    assert all(f"{name}: " in text for name in taken.__annotations__)


def test_help_explains_every_keyword_that_is_not_a_setting() -> None:
    explained = inspect.getdoc(sonde.watch) or ""
    words = (WatchRunKeywords.__annotations__.keys() - RecordingSettings.__annotations__.keys()) | {"budget"}
    assert not {name for name in words - {"criterion", "idx", "log_graph"} if name not in explained}


def test_aliases_of_the_signatures_exist() -> None:
    """The names that `help()` shows can be looked up."""
    assert all(hasattr(keywords, name) for name in ("When", "Sites", "Optimizers", "Tracker", "Tags", "Resume"))
