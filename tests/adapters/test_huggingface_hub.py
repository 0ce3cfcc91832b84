"""The real client of Hugging Face's Hub against a local server that speaks the part of its HTTP API that is needed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import pytest

import sonde
from sonde.errors import CorruptError, RunError, UsageError

pytest.importorskip("huggingface_hub")

from sonde.adapters.huggingface_hub import pull, pull_checkpoint, push
from sonde.testing.adapters import check_hint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
LARGE = 20_000
"""Files from this size on go through git-lfs, as on the Hub larger ones do."""


class Hub(BaseHTTPRequestHandler):
    """Repositories in memory. Every commit replaces or adds files."""

    repos: dict[str, dict[str, bytes]]
    objects: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        return

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, value: Any = None, *, code: int = 200, raw: bytes | None = None, **headers: str) -> None:
        content = json.dumps(value).encode() if raw is None else raw
        self.send_response(code)
        for name, text in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _missing(self, what: str) -> None:
        self._answer({"error": what}, code=404, X_Error_Code=what, X_Error_Message=what)

    def do_PUT(self) -> None:
        self.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        path, body = unquote(urlparse(self.path).path), self._body()
        if path == "/api/repos/create":
            asked = json.loads(body)
            owner = asked.get("organization") or "me"
            key = f"{asked.get('type', 'model')}s/{owner}/{asked['name']}"
            code = 409 if key in self.repos else 200
            self.repos.setdefault(key, {})
            return self._answer({"url": f"{self._root()}/{key}", "error": "exists"}, code=code)
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)
            objects = [
                {**o, "actions": {"upload": {"href": f"{self._root()}/lfs/{o['oid']}"}}} for o in asked["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")
        key, _, _ = path.removeprefix("/api/").rpartition("/preupload/")
        if key:
            files = json.loads(body)["files"]
            told = [
                {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LARGE else "regular", "shouldIgnore": False}
                for f in files
            ]
            return self._answer({"files": told})
        key, _, _ = path.removeprefix("/api/").rpartition("/commit/")
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                value = entry["value"]
                self.repos[key][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.repos[key][entry["value"]["path"]] = self.objects[entry["value"]["oid"]]
        return self._answer({"commitUrl": f"{self._root()}/{key}/commit/{self._sha(key)}", "commitOid": self._sha(key)})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        if path.startswith("/api/"):
            key, _, rest = path.removeprefix("/api/").partition("/revision/")
            if "/tree/" in path:
                key = path.removeprefix("/api/").partition("/tree/")[0]
                files = self.repos.get(key, {})
                return self._answer(
                    [{"type": "file", "path": p, "size": len(c), "oid": _sha1(c)} for p, c in files.items()]
                )
            if key not in self.repos:
                return self._missing("RepoNotFound")
            siblings = [{"rfilename": name} for name in self.repos[key]]
            return self._answer({"id": key.partition("/")[2], "sha": self._sha(key), "siblings": siblings, "tags": []})
        key, _, rest = path.lstrip("/").partition("/resolve/")
        key = key if key.startswith("datasets/") else f"models/{key}"
        content = self.repos.get(key, {}).get(rest.partition("/")[2])
        if key not in self.repos:
            return self._missing("RepoNotFound")
        if content is None:
            return self._missing("EntryNotFound")
        return self._answer(raw=content, ETag=f'"{_sha1(content)}"', X_Repo_Commit=self._sha(key))

    def _sha(self, key: str) -> str:
        return _sha1(repr(sorted((name, len(c)) for name, c in self.repos[key].items())).encode())

    def _root(self) -> str:
        return f"http://{self.headers['Host']}"


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    handler = type("OneHub", (Hub,), {"repos": {}, "objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    handler.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield handler
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path):
    with sonde.init(project="gpt", name="baseline", dir=tmp_path / "runs", verbose=False) as session:
        for step in range(40):
            session.log({"loss": 1 / (step + 1)})
            session.tap("x", np.random.default_rng(step).standard_normal(50))
            session.step()
    return sonde.open(session.path)


def test_a_run_comes_back_as_it_went(tmp_path, hub, run):
    address = push(run, "me/runs", token="t", endpoint=hub.endpoint)
    assert address.startswith(hub.endpoint)
    (path,) = pull("me/runs", dir=tmp_path / "other", token="t", endpoint=hub.endpoint)
    again = sonde.open(path)
    assert path == tmp_path / "other" / "gpt" / run.path.name
    assert again.scalars("loss").equals(run.scalars("loss"))
    assert again.stats("custom/x/norm").equals(run.stats("custom/x/norm"))
    assert again.verify() == []
    assert not (path / "lock").exists()
    assert "sonde hub pull me/runs" in hub.repos["datasets/me/runs"]["README.md"].decode()


def test_pulling_twice_leaves_what_is_there(tmp_path, hub, run):
    push(run, "me/runs", token="t", endpoint=hub.endpoint)
    first = pull("me/runs", dir=tmp_path / "other", token="t", endpoint=hub.endpoint)
    assert pull("me/runs", dir=tmp_path / "other", token="t", endpoint=hub.endpoint) == first
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["gpt"]


def test_a_damaged_run_is_refused(tmp_path, hub, run):
    push(run, "me/runs", token="t", endpoint=hub.endpoint)
    files = hub.repos["datasets/me/runs"]
    name = next(name for name in files if name.endswith(".parquet"))
    files[name] = files[name][:-20] + b"x" + files[name][-19:]
    with pytest.raises(CorruptError, match="damaged"):
        pull("me/runs", dir=tmp_path / "other", token="t", endpoint=hub.endpoint)
    assert list((tmp_path / "other").iterdir()) == []


def test_a_report_and_a_checkpoint(tmp_path, hub):
    from safetensors.numpy import save_file

    report = tmp_path / "report.html"
    report.write_text("<html></html>")
    push(report, "me/runs", token="t", endpoint=hub.endpoint)
    assert hub.repos["datasets/me/runs"]["reports/report.html"] == b"<html></html>"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"w": np.ones((100, 100), np.float32)}, folder / "model.safetensors")
    (folder / "old.bin").write_bytes(b"pickle")
    push(folder, "me/model", token="t", endpoint=hub.endpoint)
    assert set(hub.repos["models/me/model"]) == {"model.safetensors"}
    hub.repos["models/me/model"]["training_args.bin"] = b"pickle"  # somebody else's
    again = pull_checkpoint("me/model", into=tmp_path / "again", token="t", endpoint=hub.endpoint)
    assert [path.name for path in again.iterdir() if path.is_file()] == ["model.safetensors"]
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="not empty"):
        pull_checkpoint("me/model", into=tmp_path / "again", token="t", endpoint=hub.endpoint)


def test_what_cannot_be_pushed_or_pulled(tmp_path, hub):
    with pytest.raises(UsageError, match="no weights"):
        push(tmp_path, "me/model", token="t", endpoint=hub.endpoint)
    with pytest.raises(UsageError, match="not a run, a report"):
        push(tmp_path / "nowhere", "me/model", token="t", endpoint=hub.endpoint)
    with pytest.raises(RunError, match="no dataset repository"):
        pull("me/nothing", dir=tmp_path, token="t", endpoint=hub.endpoint)
    with pytest.raises(RunError, match="no model repository"):
        pull_checkpoint("me/nothing", into=tmp_path / "new", token="t", endpoint=hub.endpoint)
    with pytest.raises(UsageError, match="user/name"):
        pull("a/b/c", dir=tmp_path, token="t", endpoint=hub.endpoint)
    session = sonde.init(project="gpt", dir=tmp_path / "runs", verbose=False)
    try:
        with pytest.raises(UsageError, match="still being written"):
            push(sonde.open(session.path), "me/runs", token="t", endpoint=hub.endpoint)
    finally:
        session.finish()


@pytest.mark.parametrize("act", [lambda run, **to: push(run, "me/runs", **to), lambda _, **to: pull("me/runs", **to)])
def test_a_hub_that_does_not_answer(run, act):
    with pytest.raises(RunError, match="cannot reach the hub") as caught:
        act(run, token="t", endpoint="http://127.0.0.1:9")
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch):
    check_hint("sonde.adapters.huggingface_hub", "huggingface_hub", monkeypatch)


def test_from_the_command_line(tmp_path, hub, run):
    environment = {**os.environ, "HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "t", "HF_HUB_DISABLE_XET": "1"}

    def command(*words: str) -> Any:
        line = [sys.executable, "-m", "sonde.cli.main", "hub", *words, "--json"]
        done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    assert command("push", str(run.path), "me/runs")["commit"].startswith(hub.endpoint)
    (path,) = command("pull", "me/runs", "--dir", "other")["runs"]
    assert sonde.open(tmp_path / path).last_step == run.last_step
