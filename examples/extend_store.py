"""A store of your own: snapshots go to the run as usual, and a copy of each as .npz to an archive.

    python examples/extend_store.py

A store has six methods, follows the protocol `sonde.write.Store`, and passes `sonde.testing.StoreTests`. A package
registers it for every process with an entry point of the group `sonde.stores`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

import sonde
from sonde.write import Receipt, Snapshot, Store, add_store, open_store


class Archive:
    """The Zarr store, with a copy of every snapshot in a folder."""

    def __init__(self, run: Path, *, folder: str) -> None:
        self.inner: Store = open_store("zarr", run)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, snapshot: Snapshot) -> Receipt:
        receipt = self.inner.write(snapshot)
        values = {name: np.asarray(tensor.values()) for name, tensor in snapshot.tensors.items()}
        np.savez(self.path(snapshot.step, snapshot.attempt), allow_pickle=False, **values)
        return receipt

    def path(self, step: int, attempt: int = 0) -> Path:
        return self.folder / f"attempt-{attempt}-step-{step}.npz"

    def attempts(self) -> list[int]:
        return self.inner.attempts()

    def steps(self, attempt: int = 0) -> list[int]:
        return self.inner.steps(attempt)

    def read(self, step: int, names: Iterable[str] | None = None, *, attempt: int = 0) -> Snapshot:
        return self.inner.read(step, names, attempt=attempt)

    def delete(self, step: int, *, attempt: int = 0) -> None:
        self.inner.delete(step, attempt=attempt)  # the archive keeps its copy

    def close(self) -> None:
        self.inner.close()


def main() -> None:
    add_store("archive", Archive)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = sonde.Snapshots(when=5, store="archive", options={"folder": "archive"})
    with sonde.watch(model, optimizer, project="extend", snapshots=plan):
        for _ in range(11):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    kept = sorted(path.name for path in Path("archive").iterdir())
    print(
        f"The run has snapshots of steps {sonde.open('latest').tensors.store().steps}, the archive {', '.join(kept)}."
    )


if __name__ == "__main__":
    main()
