"""Real runs, written by the real writer, and the real command."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.record.folder import create_run
from sonde.record.writer import Writer, WriterOptions
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import MAX, MIN, SUM, SUMABS, SUMSQ, N, empty_rows

MakeRun = Callable[..., Path]


def sketch_rows(scales: Sequence[float], num_elements: int = 10) -> np.ndarray:
    """Rows of tensors whose elements are all of one value."""
    rows = empty_rows(len(scales))
    for row, scale in zip(rows, scales, strict=True):
        row[N], row[SUM], row[SUMSQ] = num_elements, num_elements * scale, num_elements * scale**2
        row[SUMABS], row[MIN], row[MAX] = num_elements * abs(scale), scale, scale
    return rows


def write_run(
    dir: Path | str = "runs",
    *,
    project: str = "gpt",
    name: str | None = "baseline",
    steps: int = 20,
    losses: Sequence[float] | None = None,
    scalars: Mapping[str, float] | None = None,
    sites: Sequence[str] = ("0.weight", "0.bias", "2.weight"),
    status: str | None = "finished",
    reason: str = "",
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    scale: float = 1.0,
    facts: Mapping[str, Any] | None = None,
    events: Sequence[str] = (),
) -> Any:
    """A run with a falling loss and gradients; with status=None it is left running and its writer is returned."""
    run = create_run(Path(dir), project=project, name=name, config=config or {}, tags=tags, notes=notes)
    writer = Writer(run, WriterOptions(heartbeat_s=0.1, flush_interval_s=0.02))
    ids = np.array(
        [writer.site_id(Site(kind="grad", name=site, shape=(10,), dtype="float32")) for site in sites], np.int32
    )
    for step in range(steps):
        now = time.time()
        rows = sketch_rows([scale * (index + 1) / (step + 1) for index in range(len(sites))])
        if len(sites):
            writer.put(StatsRecord.without_hist(step, now, ids, rows), rows.nbytes, step=step)
        loss = losses[step] if losses is not None else scale * 3.0 / (step + 1)
        values = {"loss": loss, **(scalars or {})}
        names = np.array([writer.scalar_id(key) for key in values], np.int32)
        record = ScalarsRecord(names, np.full(len(names), step), np.full(len(names), now), np.array([*values.values()]))
        writer.put(record, 100, step=step)
        writer.set_step(step)
    for message in events:
        writer.event(Event(type="test", message=message, step=0, time=time.time(), severity="warning"))
    if facts:
        writer.note(**facts)
    if status is None:
        writer.flush(10.0)
        return writer
    writer.close(status, reason=reason)  # type: ignore[arg-type]
    return run


@pytest.fixture
def make_run() -> MakeRun:
    return write_run


class Command:
    """Runs `sonde` in a process of its own."""

    def __call__(
        self, *arguments: object, env: Mapping[str, str] | None = None, stdin: str | None = None, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:sonde", **(env or {})}
        result = subprocess.run(
            [sys.executable, "-m", "sonde.cli.main", *map(str, arguments)],
            env=environment,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in result.stderr or code is None, result.stderr
        if code is not None:
            assert result.returncode == code, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result


@pytest.fixture
def sonde() -> Command:
    return Command()
