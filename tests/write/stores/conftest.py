"""A real S3 server on a free port, started once, and killed and started again by those who want to see that."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BUCKET = "lake"


class S3Server:
    """moto's server. It keeps objects in memory: a restart on the same port is a new, empty one."""

    def __init__(self, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)], stdout=log, stderr=log
            )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/moto-api/", timeout=2).close()
                break
            time.sleep(0.05)
        self.make_bucket()

    def make_bucket(self) -> None:
        request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT", headers={"Host": "s3.amazonaws.com"})
        urllib.request.urlopen(request, timeout=10).close()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("moto") / "log")
    yield server
    server.stop()


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The environment of somebody who has credentials for it."""
    for name, value in s3_environment(s3_server.url).items():
        monkeypatch.setenv(name, value)
    return s3_server


def s3_environment(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "very-secret",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@pytest.fixture
def use_endpoint(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Point the environment to any endpoint."""

    def use(url: str) -> None:
        for name, value in s3_environment(url).items():
            monkeypatch.setenv(name, value)

    return use


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    run = tmp_path / "project" / "20260101-000000-run"
    run.mkdir(parents=True)
    return run
