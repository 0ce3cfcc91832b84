"""`CheckpointAnalyzer`: reports about a folder of checkpoints and its run. Reads only; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sonde.errors import RunNotFoundError, UsageError
from sonde.read.run.checkpoints import Checkpoint, checkpoints_folder, list_checkpoints
from sonde.read.run.link import linked_run
from sonde.read.tensors.files.formats import open_tensors
from sonde.run import Run
from sonde.run import open as open_run
from sonde.show.report.standard import StandardReport, standard_report


@dataclass(frozen=True, slots=True)
class Gradients(Mapping[str, Any]):
    """Name -> (steps, gradients or their statistics); `is_whole` says which."""

    is_whole: bool
    found: Mapping[str, tuple[NDArray[np.int64], Any]]

    def __getitem__(self, name: str) -> tuple[NDArray[np.int64], Any]:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


class CheckpointAnalyzer:
    """Analyses a folder that `TrainingWrapper` wrote, a run, or any folder of checkpoints.

    report = CheckpointAnalyzer("checkpoints").generate_standard_report()
    print(report.text)
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        self.folder = Path(checkpoint_dir).absolute()
        run = linked_run(self.folder)
        self.run: Run | None = None if run is None else open_run(run)
        self.checkpoints: list[Checkpoint] = list_checkpoints(checkpoints_folder(self.folder))
        self._foreign = {} if self.checkpoints else _foreign_weights(self.folder)
        if self.run is None and not self.checkpoints and not self._foreign:
            raise RunNotFoundError(f"{self.folder} contains no checkpoints and refers to no run.")

    def generate_standard_report(self, save_to: str | os.PathLike[str] | None = None) -> StandardReport:
        """Convergence, gradient flow, weight evolution, overfitting; with `save_to`, also as a file."""
        run = self.run
        name = f"{run.project}/{run.name}" if run is not None else self.folder.name
        report = standard_report(name, run, self._weights(), [checkpoint.step for checkpoint in self.checkpoints])
        if save_to is not None:
            report.save(Path(save_to))
        return report

    def export_raw_gradients(self, path: str | os.PathLike[str] | None = None, pattern: str = "*") -> Gradients:
        """Whole gradients if snapshots of them were recorded, else their statistics at every step.

        With `path`, also written there: whole ones to .npz, statistics to .parquet.
        """
        if self.run is None:
            raise RunNotFoundError(
                f"{self.folder} refers to no run; gradients are recorded in runs, not in checkpoints."
            )
        found = _snapshots(self.run, pattern)
        whole = Gradients(bool(found), found or _statistics(self.run, pattern))
        if path is not None:
            self._write(whole, Path(path), pattern)
        return whole

    def _write(self, found: Gradients, path: Path, pattern: str) -> None:
        assert self.run is not None
        if path.suffix == ".npz" and found.is_whole:
            columns = {
                f"{name}@{step}": np.asarray(array, np.float32)
                for name, (steps, arrays) in found.items()
                for step, array in zip(steps, arrays, strict=True)
            }
            np.savez_compressed(path, **columns)  # type: ignore[arg-type]
        elif path.suffix == ".parquet":
            import pyarrow.parquet as pq

            pq.write_table(self.run.stats(f"grad/{pattern}/*").arrow, path)
        else:
            raise UsageError(
                f"whole gradients are written to .npz and statistics to .parquet; got {path.name!r}, but "
                f"{'whole gradients' if found.is_whole else 'only statistics'} were recorded."
            )

    def _weights(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Step and lazy tensors of each readable checkpoint, oldest first."""
        for checkpoint in self.checkpoints:
            if not checkpoint.problem and (checkpoint.path / "model.safetensors").is_file():
                yield checkpoint.step, open_tensors(checkpoint.path / "model.safetensors")
        for step, path in sorted(self._foreign.items()):
            yield step, open_tensors(path)


def _foreign_weights(folder: Path) -> dict[int, Path]:
    """Step -> weights, from the folders `checkpoint-500` that transformers' own trainer writes."""
    found: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        files = [path / name for name in ("model.safetensors", "adapter_model.safetensors") if (path / name).is_file()]
        if step.isdecimal() and files:
            found[int(step)] = files[0]
    return found


def _snapshots(run: Run, pattern: str) -> dict[str, tuple[NDArray[np.int64], Any]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for step in run.tensors.snapshots().column("step").to_pylist():
        for name, tensor in run.tensors.snapshot(step, f"grad/{pattern}").items():
            found.setdefault(name.removeprefix("grad/"), []).append((step, np.asarray(tensor)))
    return {
        name: (np.array([step for step, _ in rows]), [tensor for _, tensor in rows]) for name, rows in found.items()
    }


def _statistics(run: Run, pattern: str) -> dict[str, tuple[NDArray[np.int64], Any]]:
    """Site -> steps and {stat: values}."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in run.stats(f"grad/{pattern}/*").to_pylist():
        found.setdefault(row["site"], {}).setdefault(row["stat"], {})[row["step"]] = row["value"]
    tables: dict[str, tuple[NDArray[np.int64], Any]] = {}
    for site, stats in found.items():
        steps = sorted(set().union(*stats.values()))
        columns = {stat: np.array([values.get(step, np.nan) for step in steps]) for stat, values in stats.items()}
        tables[site] = np.array(steps), columns
    return tables
