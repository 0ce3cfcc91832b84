"""One thread, no downloads, and foreign packages may warn: what sonde adds to it is compared, not forbidden."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import sonde
from examination import names_recorded
from oracle import attached
from outcomes import DID_NOT_RUN, Outcome, note, note_report, short
from sonde.session.entry import current


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums over several threads are not repeatable to the bit, and nothing here may need a network."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    names_recorded.clear()
    yield
    for oracle in tuple(attached):
        oracle.detach()
    torch.set_num_threads(before)
    sonde.finish()
    current.use(None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is not in the part that every change is checked with is `foreign`: `make foreign` runs it."""
    for item in items:
        if "tests/foreign/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)
            if item.get_closest_marker("slow") is None:
                item.add_marker(pytest.mark.foreign)
            note(Outcome(short(item.nodeid), DID_NOT_RUN), is_new=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    report = yield
    note_report(report)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be imported, or is skipped as a whole, has no tests."""
    note_report(report)
