"""`sonde.ui()`: a link to a dashboard that this process serves, and how to reach it from another machine."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import torch

import sonde
from sonde.show.web.link import DashboardLink, remarks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SSH_CONNECTION", "JUPYTERHUB_SERVICE_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(2, 1)
    with sonde.watch(model, dir=tmp_path, verbose=False) as session:
        model(torch.ones(1, 2)).sum().backward()
        session.step()
    return tmp_path


def fetch(link: DashboardLink, path: str) -> bytes:
    origin, _, token = link.url.partition("/#token=")
    request = urllib.request.Request(f"{origin}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def test_link_serves_the_runs_until_stopped(folder: Path) -> None:
    link = sonde.ui(folder, port=0)
    try:
        assert b"<html" in fetch(link, "/")
        assert b"default" in fetch(link, "/api/runs")
        assert sonde.ui(folder) is link
        assert repr(link) == link.url
        assert f'href="{link.url}"' in link._repr_html_()
    finally:
        link.stop()
    assert not link.is_running
    again = sonde.ui(folder, port=0)
    assert again is not link
    again.stop()


def test_run_by_name_is_served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONDE_DIR", str(folder))
    link = sonde.ui("latest", port=0)
    assert b"default" in fetch(link, "/api/runs")
    link.stop()


def test_kernel_on_another_machine_says_how_to_reach_it() -> None:
    assert remarks(7007, {"SSH_CONNECTION": "x"})[0].startswith("From your own machine, first run:  ssh -N -L 7007:")
    on_hub = " ".join(remarks(7007, {"JUPYTERHUB_SERVICE_PREFIX": "/user/me/"}))
    assert "this JupyterHub does not forward ports" in on_hub
    assert "sonde.show.report_run" in on_hub
