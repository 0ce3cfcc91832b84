"""A storage of checkpoints of your own: one torch file per step.

    python examples/extend_checkpoints.py

A storage has three methods, or four if it can delete, and passes `sonde.testing.StorageBackendTests`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sonde.tune import Checkpoint, CheckpointManager, Payload, StorageBackend


class TorchFiles(StorageBackend):
    """`step-12.pt` with the tensors and the state, `step-12.json` with what a list shows."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def save_checkpoint(self, checkpoint: Payload, metadata: Mapping[str, Any]) -> Checkpoint:
        path = self.folder / f"step-{metadata['step']:09}"
        unfinished = path.with_suffix(".tmp")
        torch.save({"tensors": checkpoint.tensors, "state": json.dumps(checkpoint.state)}, unfinished)
        facts = {key: metadata[key] for key in ("step", "time", "metrics", "details")}
        path.with_suffix(".json").write_text(json.dumps(facts))
        unfinished.replace(path.with_suffix(".pt"))  # only a complete checkpoint has this name
        return self._entry(path.with_suffix(".pt"))

    def load_checkpoint(self, checkpoint_id: str) -> Payload:
        found = torch.load(self.folder / checkpoint_id, weights_only=True)
        return Payload(found["tensors"], json.loads(found["state"]))

    def list_checkpoints(self) -> list[Checkpoint]:
        return [self._entry(path) for path in sorted(self.folder.glob("step-*.pt"))]

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        (self.folder / checkpoint_id).unlink()

    def _entry(self, path: Path) -> Checkpoint:
        facts = json.loads(path.with_suffix(".json").read_text())
        return Checkpoint(path, facts["step"], facts["time"], facts["metrics"], path.stat().st_size, facts["details"])


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    manager = CheckpointManager(
        "checkpoints", model=model, optimizer=optimizer, interval=5, keep_last=2, storage=TorchFiles("checkpoints")
    )
    for step in range(1, 21):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step, {"loss": loss})
    print(f"Kept steps {[one.step for one in manager.list()]}; restored step {manager.restore(15)}.")


if __name__ == "__main__":
    main()
