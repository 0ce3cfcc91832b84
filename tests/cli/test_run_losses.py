"""`sonde run` of scripts that log nothing: `list`, `show`, `--sort loss`, reports and rules know their losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow]

SCRIPT = """
import json, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr={rate})
criterion = nn.CrossEntropyLoss()
x = torch.randn(96, 4)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
train = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=4)
held_out = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=12)

def epoch():
    model.train()
    losses = []
    for number, (a, b) in enumerate(train):
        loss = criterion(model(a), b) / 4
        loss.backward()
        losses.append(4 * loss.item())
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return [sum(losses[n : n + 4]) / 4 for n in range(0, len(losses), 4)]

@torch.inference_mode()
def validate():
    model.eval()
    total = sum(criterion(model(a), b).item() * len(a) for a, b in held_out)
    return total / 32

printed, validated = [], []
for _ in range(6):
    printed += epoch()
    validated.append(validate())
json.dump([printed, validated], open(sys.argv[1], "w"))
"""


def test_losses_of_a_script_that_knows_nothing_of_sonde(process: Any, sonde: Any) -> None:
    for rate in (0.03, 0.0001):
        Path("train.py").write_text(SCRIPT.format(rate=rate))
        answer = process("run", "--name", f"rate-{rate}", "train.py", f"printed-{rate}.json")
        assert answer.code == 0, answer
    printed, validated = json.loads(Path("printed-0.03.json").read_text())
    best, worst = sonde("list", "--sort", "loss", "--json").json
    assert (best["name"], worst["name"]) == ("rate-0.03", "rate-0.0001")
    assert best["loss"]["count"] == len(printed) == 24
    assert best["loss"]["first"] == pytest.approx(printed[0], rel=1e-6)
    assert best["loss"]["last"] == pytest.approx(printed[-1], rel=1e-6)
    shown = {series["name"]: series for series in sonde("show", "rate-0.03", "--json").json["scalars"]}
    assert shown["data/loss/train"]["last"] == pytest.approx(printed[-1], rel=1e-6)
    assert shown["data/loss/validation"]["count"] == 6
    assert shown["data/loss/validation"]["last_step"] == 23
    assert shown["data/loss/validation"]["last"] == pytest.approx(validated[-1], rel=1e-6)
    report = sonde("report", "rate-0.03", "--format", "json", "-o", "-").json
    analyses = {one["key"]: one["verdict"] for one in report["analyses"]}
    assert "data/loss/train fell from" in analyses["convergence"]
    assert "data/loss/validation" in analyses["overfitting"]
    assert sonde("monitor", "rate-0.03", "--once", "--json").json["loss"] == "data/loss/train"
    found = sonde("diagnose", "rate-0.03", "--json").json
    assert "loss" not in " ".join(gap["what"] for gap in found["not_recorded"])
