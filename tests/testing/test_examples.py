"""The examples of extensions pass the suites, and packages that register one are found by their entry points."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import sonde
from sonde.diagnose.rule import RULES
from sonde.testing import AdapterTests, MethodTests, MirrorTests, RuleTests, StorageBackendTests, StoreTests, window_of
from sonde.testing.mirrors import Values

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestStore(StoreTests):
    def open(self, run: Path) -> Any:
        return example("extend_store").Archive(run, folder=str(run / "archive"))


class TestStorage(StorageBackendTests):
    def open(self, folder: Path) -> Any:
        return example("extend_checkpoints").TorchFiles(folder / "checkpoints")


class TestMirror(MirrorTests):
    def sink(self, folder: Path) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return example("extend_mirror").Csv(folder / "numbers.csv")

    def read(self, folder: Path) -> Values:
        rows = [line.split(",") for line in (folder / "numbers.csv").read_text().splitlines()[1:]]
        return {(name, int(step)): float(value) for step, name, value in rows if not name.startswith("finding/")}


class TestRule(RuleTests):
    @pytest.fixture(autouse=True)
    def registered(self) -> Any:
        type(self).rule = example("extend_rule").reward_plateau
        yield
        del RULES["reward_plateau"]

    def faulty(self) -> Any:
        return window_of({"reward": np.minimum(np.arange(400), 100) - 0.001 * np.arange(400)})

    def healthy(self) -> Any:
        return window_of({"reward": np.arange(400)})


@pytest.mark.slow
class TestMethod(MethodTests):
    def method(self) -> Any:
        pytest.importorskip("trl")
        return example("extend_method").Ends()


class TestAdapter(AdapterTests):
    module, package = "sonde.adapters.trackio", "trackio"  # the example needs no package
    prefix = ""

    def recorder(self, **options: Any) -> Any:
        return example("extend_adapter").Recorder(**options)

    def train(self, net: Any, recorder: Any) -> list[float]:
        """The loop of the suite, which calls the example's callback as its trainer does."""
        optimizer = self.recipe.optimizer(net)
        error: BaseException | None = None
        if recorder:
            recorder.on_begin(net, optimizer)
        try:
            for step, batch in enumerate(self.recipe.rows().loader()):
                loss, _ = net(**batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), self.recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
                if recorder:
                    recorder.on_step(step, loss.detach())
        except BaseException as caught:
            error = caught
            raise
        finally:
            if recorder:
                recorder.on_end(error)
        return net.losses


# ---------------------------------------------------------------------------------------------------- of other packages

PACKAGE = """
from sonde.diagnose.rule import Found, rule
from sonde.write import open_store

@rule()
def of_a_package(window):
    "Something is wrong."
    yield Found("Something is wrong.", step=0, confidence=0.5, remedy="Look.")

def open(run, *, level=1):
    return open_store("memory", run)
"""
POINTS = "[sonde.rules]\nplanted = planted_package\n[sonde.stores]\nplanted = planted_package:open\n"
PROGRAM = """
import sonde
from sonde.diagnose.check import all_rules
from sonde.write import open_store
print("of_a_package" in all_rules(), type(open_store("planted", ".", {"level": 2})).__name__)
try:
    open_store("planted", ".", {"wrong": 2})
except ValueError as error:
    print(error)
"""


def test_rules_and_stores_of_other_packages_are_found(tmp_path: Path) -> None:
    (tmp_path / "planted_package.py").write_text(PACKAGE)
    info = tmp_path / "planted_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "True MemoryStore"
    assert 'the store "planted" has no option "wrong"' in lines[1]
    assert "level" in lines[1]


def test_a_store_of_a_program_is_added_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sonde.errors import UnknownNameError, UsageError
    from sonde.write import add_store, open_store
    from sonde.write.tensors import store

    monkeypatch.setattr(store, "_added", {})  # other tests do not see it
    with pytest.raises(UnknownNameError, match="mine_only"):
        open_store("mine_only", tmp_path)
    add_store("mine_only", lambda run: open_store("memory", run))
    assert open_store("mine_only", tmp_path).steps() == []
    assert sonde.Snapshots(store="mine_only").store == "mine_only"
    with pytest.raises(UsageError, match="cannot be named 'zarr'"):
        add_store("zarr", lambda run: open_store("memory", run))
