"""Real runs, written by the real writer, and the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.cli.main import main
from sonde.schema.records import Event, ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import MAX, MIN, SUM, SUMABS, SUMSQ, N, empty_rows
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions

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


@dataclass(frozen=True)
class Answer:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What was printed, which must be one JSON document without bare NaN."""
        return json.loads(self.stdout, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise AssertionError(f"bare {name} in JSON")


class Command:
    """Runs `sonde` in this process and holds it to its exit code."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> Answer:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main([str(argument) for argument in arguments])
        stdout, stderr = self.capsys.readouterr()
        answer = Answer(int(exit.value.code or 0), stdout, stderr)
        assert answer.code == code, answer
        return answer


@pytest.fixture
def sonde(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def run_process(*arguments: object, env: Mapping[str, str] | None = None, stdin: str = "") -> Answer:
    """The same in a separate process."""
    command = [sys.executable, "-m", "sonde.cli.main", *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    result = subprocess.run(
        command, env=environment, input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    return Answer(result.returncode, result.stdout, result.stderr)


@pytest.fixture
def process() -> Callable[..., Answer]:
    return run_process
