"""A mirror of your own: the numbers and findings of a run go to a CSV file while it trains.

    python examples/extend_mirror.py

A sink has four methods, follows the protocol `sonde.adapters.Sink`, and passes `sonde.testing.MirrorTests`. It runs on
a separate thread: it may wait, and training does not. A package registers it under a name with an entry point of the
group `sonde.mirrors`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import sonde
from sonde.adapters import FindingRow


class Csv:
    """One line for each number."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def begin(self, run: Mapping[str, Any]) -> None:
        self.file = self.path.open("w", newline="", encoding="utf-8")
        self.lines = csv.writer(self.file)
        self.lines.writerow(("step", "name", "value"))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.writerows((step, name, value) for name, value in values.items())

    def finding(self, found: FindingRow) -> None:
        self.lines.writerow((found.step, f"finding/{found.rule}", found.message))

    def close(self, status: str) -> None:
        self.file.close()


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sonde.watch(model, optimizer, project="extend", mirror=sonde.Mirror(to=Csv("numbers.csv"), every=5)):
        for _ in range(20):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sonde.log({"loss": loss})
    lines = Path("numbers.csv").read_text().splitlines()
    print(f"numbers.csv has {sum(',loss,' in line for line in lines)} losses and the norms of every fifth step.")


if __name__ == "__main__":
    main()
