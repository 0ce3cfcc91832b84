"""Stock readers get the values: zarr-python and icechunk, in a process that never imports sonde, read every tensor of
every snapshot of a real training run under its own name, bit by bit what torch.save wrote in the same step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sonde

STOCK_READER = Path(__file__).with_name("stock_reader.py")
STEPS = 12


class Zoo(nn.Module):
    """Parameters and buffers of every type, of no dimension, of no element, and out of order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.sixteen = nn.Linear(8, 8, dtype=torch.float16)
        self.brain = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.randn(5, 8).t())
        self.rotation = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("e4m3", torch.randn(9).to(torch.float8_e4m3fn))
        self.register_buffer("e5m2", torch.randn(2, 3).to(torch.float8_e5m2))
        self.register_buffer("small", torch.arange(5, dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        x = self.brain(self.sixteen(x.half()).bfloat16()).float() @ self.turned
        return x.sum() * self.scale + self.rotation.abs().sum() + self.wide.sum() + self.empty.sum()


def train(folder: Path, references: Path, **plan: Any) -> Path:
    """With snapshots of every step, and `torch.save` of the same tensors at the same moment."""
    torch.manual_seed(0)
    references.mkdir()
    model = Zoo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept: dict[str, Tensor] = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda _, __, out, name=name: kept.update({f"act/{name}": out.detach().clone()}))
    snapshots = sonde.Snapshots(when=sonde.every(1), kinds="all", **plan)
    with sonde.init(dir=folder, verbose=False) as session:
        session.watch(model, optimizer, snapshots=snapshots)
        for step in range(STEPS):
            x = torch.randn(16, 6)
            loss = model(x)
            loss.backward()
            reference = {**kept, "act/model": loss.detach(), "batch/input.0": x}
            reference |= {f"param/{name}": value for name, value in model.state_dict().items()}
            reference |= {f"grad/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
            reference |= {
                f"optim/{name}.{key}": value
                for name, p in model.named_parameters()
                for key, value in optimizer.state[p].items()
            }
            torch.save(reference, references / f"{step}.pt")
            optimizer.step()
            optimizer.zero_grad()
        assert session.path is not None
        return session.path


def stock_read(where: str | Path, references: Path) -> dict[str, Any]:
    command = [sys.executable, str(STOCK_READER), str(where), str(references)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_all_equal(found: dict[str, Any]) -> None:
    assert found["different"] == []
    assert found["extra"] == []
    assert found["equal"] > STEPS * 60


def test_zarr_alone_reads_every_tensor_of_every_snapshot(tmp_path: Path) -> None:
    run = train(tmp_path / "runs", tmp_path / "references")
    assert_all_equal(stock_read(run / "tensors", tmp_path / "references"))


@pytest.mark.slow
def test_icechunk_alone_reads_every_tensor_of_every_snapshot(tmp_path: Path) -> None:
    run = train(tmp_path / "runs", tmp_path / "references", store="icechunk", options={"close_s": 120.0})
    assert_all_equal(stock_read(run / "icechunk" / "repository", tmp_path / "references"))


@pytest.mark.slow
@pytest.mark.usefixtures("s3")
def test_icechunk_alone_reads_every_tensor_from_a_bucket(tmp_path: Path) -> None:
    url = "s3://lake/stock"
    run = train(tmp_path / "runs", tmp_path / "references", store=url, options={"close_s": 120.0})
    assert_all_equal(stock_read(f"{url}/{run.parent.name}/{run.name}", tmp_path / "references"))
