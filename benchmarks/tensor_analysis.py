"""The cost of analysing whole tensors: one layer over time, and each analysis, relative to reading the tensors.

    python benchmarks/tensor_analysis.py              # a few minutes on two cores

The tensors drift as weights do and are in the default store. The cost of an analysis is relative to reading the same
tensors from the same store; the cost of comparing two files is relative to reading both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from report import describe_machine
from sonde.read.compare.weights import compare_weights
from sonde.read.tensors.analysis.spectra import EXACT_UP_TO, spectrum
from sonde.read.tensors.files.formats import open_tensors
from sonde.read.tensors.stores import FolderTensorStore, read_file
from sonde.read.tensors.tensors import tensor_over_steps
from sonde.run import Run
from sonde.schema.snapshots.tensors import HostTensor, Snapshot
from sonde.show.export.tensors import plan_export, write_export
from sonde.write.folder import create_run
from sonde.write.tensors.store import open_store
from sonde.write.writer import Writer, WriterOptions

RESULTS = Path(__file__).parent / "results"
SHAPE = (256, 256)


def make_run(folder: Path, num_layers: int, num_steps: int) -> Run:
    path = create_run(folder, project="bench", name="tensors", config={}, tags=(), notes="")
    store = open_store("zarr", path)
    rng = np.random.default_rng(0)
    weights = {f"param/layers.{i}.weight": rng.normal(size=SHAPE).astype(np.float32) for i in range(num_layers)}
    for step in range(num_steps):
        store.write(Snapshot(step, float(step), "bench", {n: HostTensor.of(w.copy()) for n, w in weights.items()}))
        for weight in weights.values():
            weight += rng.normal(size=SHAPE).astype(np.float32) * np.float32(1e-3)
    store.close()
    Writer(path, WriterOptions()).close("finished")
    return Run(path)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def one_layer(run: Run) -> dict[str, float]:
    """Bytes read for one layer over all snapshots, as a fraction of the store's."""
    num_read = 0

    def counting(path: Path, offset: int, size: int) -> bytes:
        nonlocal num_read
        found = read_file(path, offset, size)
        num_read += len(found)
        return found

    store = FolderTensorStore(run.path, read_file=counting)
    took = seconds(lambda: tensor_over_steps(lambda: store, "param/layers.7.weight").load())
    stored = sum(file.stat().st_size for file in (run.path / "tensors").rglob("*") if file.is_file())
    return {"share_of_bytes": num_read / stored, "seconds": took}


def questions(run: Run) -> dict[str, float]:
    """Seconds of each analysis over every tensor of every snapshot, relative to reading them."""
    store = run.tensors.store()
    names = list(store.entries(0))
    read_s = seconds(lambda: [store.read(step, name) for name in names for step in store.steps])
    tensors = run.tensors
    asked: dict[str, Callable[[], Any]] = {
        "evolution": lambda: tensors.evolution("param/*"),
        "distribution": lambda: tensors.distribution("param/*"),
        "similarity": lambda: tensors.similarity("param/*"),
        "spectra": lambda: tensors.spectra("param/*"),
    }
    return {"read_s": read_s, **{name: seconds(work) / read_s for name, work in asked.items()}}


def spectra() -> dict[str, float]:
    """Seconds for the spectrum of the largest matrix that is computed exactly, and of a larger one."""
    rng = np.random.default_rng(0)
    small, large = (rng.normal(size=(size, size)) for size in (EXACT_UP_TO, 4 * EXACT_UP_TO))
    return {"exact_1024_s": seconds(lambda: spectrum(small)), "randomized_4096_s": seconds(lambda: spectrum(large))}


def comparing(run: Run, folder: Path) -> dict[str, float]:
    paths = [folder / f"{step}.safetensors" for step in (0, run.tensors.store().steps[-1])]
    for path in paths:
        write_export(plan_export(run, "weights", "safetensors", steps=slice(int(path.stem), int(path.stem) + 1)), path)
    read_s = seconds(lambda: [np.array(value) for path in paths for value in open_tensors(path).values()])
    compare_s = seconds(lambda: compare_weights(*(open_tensors(path) for path in paths)))
    return {"times_reading": compare_s / read_s, "mb_per_s": 2e-6 * paths[0].stat().st_size / compare_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save", action="store_true", help="write the numbers to benchmarks/results/")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), given.layers, given.steps)
        found = {
            "machine": describe_machine(threads=1),
            "layers": given.layers,
            "steps": given.steps,
            "one_layer_over_time": one_layer(run),
            "questions_relative_to_reading": questions(run),
            "spectra": spectra(),
            "compare": comparing(run, Path(folder)),
        }
    text = json.dumps(found, indent=2)
    print(text)
    if given.save:
        (RESULTS / "tensor-analysis.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
