"""Runs that are known in every cell, and a browser's side of the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from big_run import Plan, Planted, big_run
from sonde.show.web.access import Access
from sonde.show.web.answering import Answers
from sonde.show.web.app import make_app
from sonde.show.web.runs import RunTable, run_key
from sonde.show.web.wire import read_binary

ORIGIN = "http://127.0.0.1:7007"
NAN_AT = Planted(tensor=5, step=1777, num_nan=1)
SPIKE_AT = Planted(tensor=9, step=2345, factor=1e4)
PLAN = Plan(num_tensors=16, num_steps=3000, kinds=("grad", "act"), planted=(NAN_AT, SPIKE_AT))


@dataclass
class Page:
    """A logged-in browser page, and what the server holds."""

    client: TestClient
    answers: Answers
    access: Access

    def get(self, path: str, status: int = 200) -> Any:
        response = self.client.get(path)
        assert response.status_code == status, response.text
        if response.headers["content-type"] == "application/octet-stream":
            return read_binary(response.content)
        return json.loads(response.text, parse_constant=_refuse)

    def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        response = self.client.post(path, json=body, headers={"Origin": ORIGIN})
        assert response.status_code == status, response.text
        return response

    def delete(self, path: str, status: int = 200) -> Any:
        response = self.client.delete(path, headers={"Origin": ORIGIN})
        assert response.status_code == status, response.text
        return response


def _refuse(constant: str) -> float:
    raise AssertionError(f"bare {constant} in JSON")


@pytest.fixture(scope="session")
def known_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 gradients and 16 activations, 3,000 steps, sealed; a NaN and a spike are planted. Not to be changed."""
    return big_run(tmp_path_factory.mktemp("known"), PLAN)


def _pages() -> Iterator[Callable[..., Page]]:
    opened: list[Page] = []

    def start(*places: Path, can_delete: bool = True, **options: Any) -> Page:
        access = Access(port=7007)
        answers = Answers(RunTable(places), can_delete=can_delete)
        app: Any = make_app(answers, access, ("127.0.0.1", "localhost"), **options)
        client = TestClient(app, base_url=ORIGIN)
        opened.append(Page(client, answers, access))
        response = client.post("/api/login", json={"token": access.token}, headers={"Origin": ORIGIN})
        assert response.status_code == 204, response.text
        return opened[-1]

    yield start
    for page in opened:
        page.client.close()
        page.answers.close()


@pytest.fixture
def open_page() -> Iterator[Callable[..., Page]]:
    """`open_page(folder, …)` starts the application on folders of runs and logs in."""
    yield from _pages()


@pytest.fixture(scope="module")
def open_pages() -> Iterator[Callable[..., Page]]:
    """The same for pages that all tests of a file share."""
    yield from _pages()


@pytest.fixture
def page(open_page: Callable[..., Page], known_run: Path) -> Page:
    """The known run, asked as a browser would."""
    return open_page(known_run.parent.parent)


@pytest.fixture
def api(known_run: Path) -> str:
    """The known run's part of the API."""
    return f"/api/runs/{run_key(known_run.resolve())}"
