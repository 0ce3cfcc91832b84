"""The store in a container of Azure, against Azurite. It is not a Python package: `make azurite` puts it into .venv.

Without it the tests skip themselves; SONDE_TEST_AZURITE names the command of another one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from sonde.schema.snapshots.tensors import Snapshot
from sonde.testing.stores import StoreTests, drifting
from sonde.write.tensors.store import Store, open_store

ACCOUNT = "devstoreaccount1"
# The same for every Azurite there is.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
COMMAND = (
    os.environ.get("SONDE_TEST_AZURITE")
    or shutil.which("azurite-blob", path=str(Path(sys.prefix, "bin")))
    or shutil.which("azurite-blob")
)


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert COMMAND is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("azurite")
    command = [COMMAND, "--silent", "--skipApiVersionCheck", "--blobPort", str(port), "--location", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        make_container(port, "lake")
        yield f"http://127.0.0.1:{port}/{ACCOUNT}"
    finally:
        server.kill()
        server.wait()


def make_container(port: int, name: str) -> None:
    """One signed request; waits until the server listens."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06", "Content-Length": "0"}
    lines = "".join(f"{key}:{headers[key]}\n" for key in ("x-ms-date", "x-ms-version"))
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\n{lines}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/{name}?restype=container"
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=10).close()
        except ConnectionError:
            assert time.monotonic() < end, "Azurite never listened"
            time.sleep(0.1)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError) or time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


@pytest.mark.slow
@pytest.mark.skipif(COMMAND is None, reason="Azurite is not installed: make azurite")
class TestAzure(StoreTests):
    @pytest.fixture(autouse=True)
    def environment(self, azurite: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azurite)

    def open(self, run: Path) -> Store:
        return open_store(f"az://lake/{run.parent.name}-{run.name}", run, {"keep_local": False})

    def test_it_is_really_there(self, run: Path) -> None:
        from sonde.read.tensors.stores import open_tensor_store

        store: Any = self.open(run)
        store.write(Snapshot(5, 0.0, "", drifting(5)))
        assert store.drain(60)
        store.close()
        found = open_tensor_store(run, branch="main").read(5, "param/weight")
        assert found.tobytes() == drifting(5)["param/weight"].flat().tobytes()
