"""Every test starts in its own empty folder and without SONDE_* variables, so none can see another's runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# Keras chooses its back-end when it is first imported, by whichever test of this process that is.
os.environ.setdefault("KERAS_BACKEND", "torch")
# A shared machine is slow at times; a wall-clock limit per example would fail tests that are right.
settings.register_profile("sonde", deadline=None, print_blob=True)
settings.load_profile("sonde")
# A shell ignores SIGINT in what it starts in the background, and every process below inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test marked `gpu` skips itself where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder a test runs in; a run written without a `dir` lands here and not in the checkout."""
    for name in [name for name in os.environ if name.startswith("SONDE_") and not name.startswith("SONDE_TEST_")]:
        monkeypatch.delenv(name)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):  # how wide and colourful output is, a test says itself
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def seconds_to_spend(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How busy the machine is must not decide what a test records. Tests of the budget say what they need."""
    monkeypatch.setenv("SONDE_BUDGET_SECONDS", "3600")


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    """Where anything was compiled, function calls are not inspected; what another test compiled must not count."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is not None:
        utils.counters.clear()


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Wait for a claim to come true:  until(lambda: writer.degraded). A broken promise fails here, not by a timeout."""

    def wait(claim: Callable[[], object], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not claim():
            assert time.monotonic() < end, f"not true after {timeout_s:g} s"
            time.sleep(0.01)

    return wait


@pytest.fixture
def offline_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Weights & Biases, writing here: it reads its variables once per process, until it is torn down."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    yield wandb
    wandb.teardown()
