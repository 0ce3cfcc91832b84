"""A session per test, quiet, in the test's own folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import sonde
from sonde.session.entry import current
from sonde.write.writer import wait_for_closing


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`begin(**settings)` starts the session of this process; it is finished when the test ends."""

    def start(**settings: Any) -> Any:
        return sonde.init(**{"project": "test", "dir": tmp_path / "runs", "verbose": False, **settings})

    yield start
    sonde.finish()
    current.use(None)


@pytest.fixture
def reopen(tmp_path: Path) -> Callable[[], Any]:
    """Finish the session and open what it wrote."""

    def read() -> Any:
        sonde.finish()
        latest = tmp_path / "runs" / "latest"
        wait_for_closing(latest.resolve())  # on a slow disk, `finish` does not wait for the last facts
        return sonde.open(latest)

    return read


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
