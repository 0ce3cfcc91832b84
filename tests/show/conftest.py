"""Runs with layers, a loss, a validation loss and, where asked, a NaN: written by the real writer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.reduce.numpy import sketch
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import NUM_BINS
from sonde.write.folder import create_run
from sonde.write.writer import Writer, WriterOptions

LAYERS = ("embed.weight", "layers.0.weight", "layers.1.weight", "layers.2.weight", "head.weight")
OPTIONS = WriterOptions(heartbeat_s=0.1, flush_interval_s=0.02, system_interval_s=60.0)


class Recording:
    """A run that is being written, step by step."""

    def __init__(self, path: Path, layers: Sequence[str] = LAYERS, kinds: Sequence[str] = ("param", "grad")) -> None:
        self.path, self.writer, self.step = path, Writer(path, OPTIONS), 0
        self.layers, self.kinds = layers, kinds
        self.ids = np.array(
            [
                self.writer.site_id(Site(kind=kind, name=name, shape=(4, 8), dtype="float32", owner=name[:-7]))
                for kind in kinds
                for name in layers
            ],
            np.int32,
        )

    def steps(self, number: int, loss: Callable[[int], float], val: Any = None, nan_at: int | None = None) -> Recording:
        for step in range(self.step, self.step + number):
            self._write(step, loss(step), None if val is None or step % 5 else val(step), nan_at)
        self.step += number
        return self

    def _write(self, step: int, loss: float, val: float | None, nan_at: int | None) -> None:
        rng = np.random.default_rng(step)
        rows, hists = [], []
        for kind in self.kinds:
            for depth in range(len(self.layers)):
                scale = 0.1 * (1 + 0.01 * step) if kind == "param" else 10.0 ** (depth - len(self.layers)) / (1 + step)
                tensor = rng.normal(size=(4, 8)) * scale
                if kind == "grad" and nan_at is not None and step == nan_at and depth == 2:
                    tensor[0, 0] = np.nan
                made = sketch(tensor, histogram=True)
                rows.append(made.rows)
                hists.append(made.hist)
        now = time.time()
        index = np.arange(len(rows), dtype=np.int32)
        hist = np.array(hists, np.float32).reshape(len(rows), NUM_BINS)
        self.writer.put(StatsRecord(step, now, self.ids, np.array(rows), index, hist), 1000, step=step)
        values = {"loss": loss, "lr": 0.001, **({} if val is None else {"val/loss": val})}
        names = np.array([self.writer.scalar_id(name) for name in values], np.int32)
        count = len(names)
        self.writer.put(
            ScalarsRecord(names, np.full(count, step), np.full(count, now), np.array([*values.values()])),
            100,
            step=step,
        )
        self.writer.set_step(step)

    def flush(self) -> Recording:
        assert self.writer.flush(10.0)
        return self

    def finish(self, status: Any = "finished") -> Path:
        self.writer.close(status)
        return self.path


HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>"


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty steps with a NaN at step 30, and texts that would like to be markup. Made once, not to be changed."""
    folder = tmp_path_factory.mktemp("hostile") / "runs"
    path = create_run(folder, project="gpt", name="baseline", config={"lr": 0.1, "note": HOSTILE}, notes=HOSTILE)
    return Recording(path).steps(40, lambda step: 3.0 / (1 + step), val=lambda step: 1.0, nan_at=30).finish()


@pytest.fixture
def begin(tmp_path: Path) -> Any:
    """`begin("name", layers=…)` begins a run in `tmp_path/runs`; one left open is finished at the end of the test."""
    begun: list[Recording] = []

    def make(
        name: str = "baseline",
        *,
        project: str = "gpt",
        layers: Sequence[str] = LAYERS,
        kinds: Sequence[str] = ("param", "grad"),
        config: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> Recording:
        path = create_run(tmp_path / "runs", project=project, name=name, config=config or {}, **keywords)
        begun.append(Recording(path, layers, kinds))
        return begun[-1]

    yield make
    for recording in begun:
        recording.writer.close("finished")
