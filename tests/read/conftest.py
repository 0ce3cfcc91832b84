"""Runs made by the real writer, of tensors that the tests know."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sonde.reduce.numpy import sketch
from sonde.run import Run
from sonde.schema.records import ScalarsRecord, Site, StatsRecord
from sonde.schema.sketch import GRAD_MOMENT, GRAD_SQ_OVER_V, GRAD_UPDATE, NUM_BINS, SUMSQ_RAW
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.write.folder import create_run
from sonde.write.tensors.store import open_store
from sonde.write.writer import Writer, WriterOptions

SITES = [
    (kind, name)
    for name in ("0.weight", "0.bias")
    for kind, name in (("param", name), ("grad", name), ("update", name), ("optim", f"{name}.exp_avg"))
]
OPTIONS = WriterOptions(flush_interval_s=0.02, heartbeat_s=0.1, seal_steps=16, system_interval_s=60.0)


@dataclass
class Recording:
    """A run being written, and every tensor and scalar that went into it."""

    path: Path
    writer: Writer
    seed: int = 0
    diverge_at: int | None = None
    num_steps: int = 0
    tensors: dict[tuple[str, str, int], np.ndarray] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)

    def steps(self, number: int) -> Recording:
        for step in range(self.num_steps, self.num_steps + number):
            self._record(step)
        self.num_steps += number
        return self

    def flush(self) -> Recording:
        assert self.writer.flush(10.0)
        return self

    def finish(self) -> Recording:
        self.writer.close("finished")
        return self

    def _record(self, step: int) -> None:
        rng = np.random.default_rng([self.seed, step])
        shift = 0.25 if self.diverge_at is not None and step >= self.diverge_at else 0.0
        rows, hists, ids = [], [], []
        for kind, name in SITES:
            tensor = rng.normal(size=(8, 4)) + shift
            tensor[0, 0] = 0.0
            if step == 5 and (kind, name) == ("grad", "0.bias"):
                tensor[1, 0], tensor[1, 1], tensor[1, 2] = np.nan, np.inf, -np.inf
            self.tensors[kind, name, step] = tensor
            made = sketch(tensor, histogram=step % 2 == 0)
            if kind == "update":
                self._pair(made.rows, name, step, tensor)
            if (kind, name) == ("grad", "0.weight"):
                made.rows[SUMSQ_RAW] = 4.0 * (tensor**2).sum()
            rows.append(made.rows)
            hists.append(made.hist)
            ids.append(self.writer.site_id(Site(kind=kind, name=name, shape=(8, 4), dtype="float64", owner="0")))
        self._put(step, np.array(ids, np.int32), np.array(rows), np.array(hists))

    def _pair(self, row: np.ndarray, name: str, step: int, update: np.ndarray) -> None:
        grad = self.tensors["grad", name, step]
        row[GRAD_UPDATE] = np.nansum(np.where(np.isfinite(grad), grad, 0.0) * update)
        row[GRAD_MOMENT] = 0.5
        row[GRAD_SQ_OVER_V] = 64.0

    def _put(self, step: int, ids: np.ndarray, rows: np.ndarray, hists: np.ndarray) -> None:
        with_hist = np.arange(len(ids), dtype=np.int32) if step % 2 == 0 else np.empty(0, np.int32)
        hist = hists.astype(np.float32) if step % 2 == 0 else np.empty((0, NUM_BINS), np.float32)
        assert self.writer.put(StatsRecord(step, 1e9 + step, ids, rows, with_hist, hist), rows.nbytes, step=step)
        self.losses.append(1.0 / (step + 1) + (1.0 if step == self.diverge_at else 0.0))
        names = np.array([self.writer.scalar_id("loss"), self.writer.scalar_id("train/lr")], np.int32)
        values = np.array([self.losses[-1], 0.1])
        scalars = ScalarsRecord(names, np.full(2, step), np.full(2, 1e9 + step), values)
        assert self.writer.put(scalars, values.nbytes, step=step)
        self.writer.set_step(step + 1)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[..., Recording]]:
    """`record("name", seed=…, diverge_at=…, config=…)` begins a run in `tmp_path/runs`."""
    begun: list[Recording] = []

    def begin(
        name: str = "baseline",
        *,
        project: str = "gpt",
        seed: int = 0,
        diverge_at: int | None = None,
        options: WriterOptions = OPTIONS,
        **keywords: Any,
    ) -> Recording:
        path = create_run(tmp_path / "runs", project=project, name=name, **keywords)
        begun.append(Recording(path, Writer(path, options), seed, diverge_at))
        return begun[-1]

    yield begin
    for recording in begun:
        recording.writer.close("finished")


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Forty steps, sealed in several segments. Not to be changed: see `finished`."""
    path = create_run(tmp_path_factory.mktemp("runs"), project="gpt", name="baseline", config={"lr": 0.1})
    recording = Recording(path, Writer(path, OPTIONS))
    for _ in range(5):
        recording.steps(8).flush()
    return recording.finish()


@pytest.fixture
def finished(finished_once: Recording, tmp_path: Path) -> Recording:
    """A copy of a finished run, to look at or to damage."""
    path = tmp_path / "runs" / "gpt" / finished_once.path.name
    shutil.copytree(finished_once.path, path)
    return Recording(
        path, finished_once.writer, num_steps=40, tensors=finished_once.tensors, losses=finished_once.losses
    )


def write_snapshots(dir: Path, snapshots: Mapping[int, Mapping[str, np.ndarray]], options: Any = None) -> Run:
    """A finished run with these tensors, kept by the real store."""
    path = create_run(dir, project="lake", name=None, config={}, tags=(), notes="")
    store = open_store("zarr", path, options)
    for step, tensors in snapshots.items():
        host = {name: HostTensor.of(np.asarray(array, order="C")) for name, array in tensors.items()}
        store.write(Snapshot(step, 1000.0 + step, "test", host))
    store.close()
    Writer(path, OPTIONS).close("finished")
    return Run(path)


@pytest.fixture(scope="session")
def keep_snapshots(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    return lambda snapshots, options=None: write_snapshots(tmp_path_factory.mktemp("lakes"), snapshots, options)
