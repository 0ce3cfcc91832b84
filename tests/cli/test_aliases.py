"""Hidden verbs: they accept the options they always had and print what the verb they stand for prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.tensors.store import open_store


@pytest.fixture
def run(make_run: Any) -> Path:
    path: Path = make_run(losses=[3.0] * 10 + [float("nan")] * 10)
    store = open_store("zarr", path)
    for step in (0, 5):
        tensor = HostTensor.of(np.full((4, 4), 1.0 + step, np.float32))
        store.write(Snapshot(step, 1.0, "test", {"param/0.weight": tensor, "grad/0.weight": tensor}))
    store.close()
    return path


@pytest.mark.parametrize(
    ("alias", "verb"),
    [
        (["anomalies"], ["diagnose", "--table", "--exit-zero"]),
        (["anomalies", "latest", "-s", "warning"], ["diagnose", "--table", "--exit-zero", "-s", "warning"]),
        (["anomalies", "--type", "*", "--json"], ["diagnose", "--table", "--exit-zero", "--type", "*", "--json"]),
        (["analyze"], ["report", "--format", "txt", "-o", "-"]),
        (["info"], ["doctor", "--no-checks"]),
        (["info", "--json", "--dir", "runs"], ["doctor", "--no-checks", "--json", "--dir", "runs"]),
        (["info", "--settings"], ["doctor", "--settings"]),
        (["weights", "latest"], ["show", "latest", "--tensors", "param/*"]),
        (
            ["weights", "latest", "grad/*", "--at", "0", "--no-spectra", "--top", "1", "--json"],
            ["show", "latest", "--tensors", "grad/*", "--at", "0", "--no-spectra", "--top", "1", "--json"],
        ),
    ],
)
def test_an_alias_prints_what_its_verb_prints(alias: list[str], verb: list[str], run: Path, sonde: Any) -> None:
    first = sonde(*alias)
    assert first.stdout
    assert first == sonde(*verb)


def test_an_alias_fails_as_its_verb_fails(run: Path, sonde: Any) -> None:
    ours = sonde("push", "latest", "--patience", "1", code=1)
    assert ours == sonde("snapshot", "latest", "--upload", "--patience", "1", code=1)
    assert "nothing to upload" in ours.stderr
    assert sonde("anomalies", "--type", "nsuch", code=2) == sonde("diagnose", "--type", "nsuch", code=2)


def test_analyze_also_writes_files(run: Path, sonde: Any) -> None:
    answer = sonde("analyze", run, "--output", "r.html", "--gradients", "g.npz", "--json")
    assert answer.json["convergence"]["title"] == "Training convergence"
    assert "Wrote the report to r.html." in answer.stderr
    assert "Wrote full gradients of 1 parameter to g.npz." in answer.stderr
    assert "Weight evolution" in Path("r.html").read_text()
    assert Path("g.npz").exists()


def test_an_alias_helps_with_its_verb(sonde: Any) -> None:
    assert "Same as `sonde diagnose --table --exit-zero`." in sonde("anomalies", "--help").stdout
