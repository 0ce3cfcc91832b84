"""`sonde snapshot --upload`: what waits goes up, and the exit status says whether all of it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.read.tensors.stores import open_tensor_store
from sonde.schema.snapshots.addresses import ICECHUNK_FOLDER
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.schema.snapshots.uploads import UploadState
from sonde.write.tensors.local import LocalStore
from sonde.write.tensors.upload import Spool


def leave_waiting(run: Path, url: str = ICECHUNK_FOLDER) -> None:
    """As a training that was killed left it: two snapshots in the spool, none uploaded."""
    local = LocalStore(run)
    for step in (10, 20):
        local.write(Snapshot(step, 0.0, "", {"param/w": HostTensor.of(np.full(5, step, np.float32))}))
    local.close()
    Spool(run).keep(UploadState(url, keeps_local=False))


@pytest.mark.slow
def test_what_waits_is_uploaded(sonde: Any, make_run: Any) -> None:
    run = make_run()
    leave_waiting(run)
    answer = sonde("snapshot", "latest", "--upload", "--json")
    assert answer.json == {"url": "icechunk", "uploaded": 2, "waiting": 0, "last_error": ""}
    assert [path.name for path in (run / "tensors").iterdir()] == []
    assert open_tensor_store(run).read(20, "param/w").tolist() == [20.0] * 5
    assert "0 uploaded to icechunk, 0 waiting" in sonde("snapshot", "latest", "--upload").stdout


@pytest.mark.slow
def test_what_cannot_be_uploaded_is_reported(sonde: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server listens there: the snapshots stay, the reason is reported, and the exit status is 1."""
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    leave_waiting(make_run(), "s3://bucket/prefix")
    answer = sonde("snapshot", "latest", "--upload", "--patience", "1", code=1)
    assert "0 uploaded to s3://bucket/prefix, 2 waiting" in answer.stdout
    assert "sonde snapshot latest --upload" in answer.stderr


def test_a_run_without_a_bucket_has_nothing_to_push(sonde: Any, make_run: Any) -> None:
    make_run()
    answer = sonde("snapshot", "latest", "--upload", code=1)
    assert "nothing to upload" in answer.stderr
