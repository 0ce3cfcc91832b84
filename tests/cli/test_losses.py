"""`list`, `show`, `monitor`, `report`, `analyze` and `diagnose` give the same loss and the same verdict for one run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sonde as sonde_api
from sonde.diagnose.measures.loss import loss_name


def train(name: str, log: Any, *, lr: float = 0.1, steps: int = 40, watch: bool = True) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    with sonde_api.init(project="p", name=name, system_metrics=False, verbose=False) as session:
        if watch:
            session.watch(net, optimizer)
        for step in range(steps):
            x = torch.randn(16, 4)
            y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(log(step, loss))
            if not watch:
                session.step()


RUNS = {
    "tensorboard": (lambda step, loss: {"Loss/train": loss, "Loss/val": 1.1 * loss}, {}),
    "total": (lambda step, loss: {"aux_loss": 0.1, "total_loss": loss}, {}),
    "objective": (lambda step, loss: {"objective/loss": 2 * loss, "loss": loss}, {}),
    "diverging": (lambda step, loss: {"train/loss": 0.5 + 0.2 * step}, {}),
    "no loss": (lambda step, loss: {"accuracy": 0.5}, {"watch": False}),
    "short": (lambda step, loss: {"loss": loss}, {"steps": 4}),
}


@pytest.mark.parametrize("kind", RUNS)
def test_commands_agree_on_the_loss(sonde: Any, kind: str) -> None:
    log, options = RUNS[kind]
    train(kind, log, **options)
    (listed,) = sonde("list", "--sort", "loss", "--json").json
    shown = sonde("show", "latest", "--json").json
    watched = sonde("monitor", "latest", "--once", "--json").json
    report = sonde("report", "latest", "--format", "json", "-o", "-").json
    analysis = sonde("analyze", "latest", "--json").json
    convergence = report["analyses"][0]

    assert analysis["convergence"]["verdict"] == convergence["verdict"]
    facts = {one["name"]: one["value"] for one in convergence["quantities"] if one["value"] is not None}
    assert analysis["convergence"]["facts"] == facts
    assert listed["loss"] == shown["loss"]
    name = None if listed["loss"] is None else listed["loss"]["name"]
    assert watched["loss"] == name
    assert [chart["lines"][0]["name"] for chart in convergence["charts"][:1]] == ([] if name is None else [name])
    if "first value" in facts:
        assert facts["first value"] == pytest.approx(listed["loss"]["first"])
    window = sonde_api.open("latest").window()
    assert loss_name(window) == name
