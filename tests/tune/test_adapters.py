"""What is measured of adapters is what forming their product would have shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from sonde.tune.lora import AdapterRecorder


class Lora(nn.Module):
    """W + scale · B A, as PEFT lays it out."""

    def __init__(self, num_in: int, num_out: int, rank: int, scale: float) -> None:
        super().__init__()
        self.base_layer = nn.Linear(num_in, num_out)
        self.base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(num_in, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, num_out, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.scaling = {"default": scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))

    def delta(self) -> np.ndarray:
        product = self.lora_B["default"].weight @ self.lora_A["default"].weight
        return self.scaling["default"] * product.detach().double().numpy()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = Lora(12, 10, 3, 2.0)
        self.v = Lora(10, 8, 2, 0.5)
        self.idle = Lora(8, 8, 2, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v(torch.tanh(self.q(x)))


def test_numbers_of_the_product(tmp_path):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=0.05)
    deltas = []
    with sonde.init(project="p", name="n", dir=tmp_path) as session:
        session.watch(net, optimizer)
        recorder = AdapterRecorder(session)
        assert recorder.follow(net) == 3
        for step in range(4):
            net(torch.randn(16, 12)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.record(step)
            deltas.append(net.q.delta())
    run = sonde.open("p/n", dir=tmp_path)

    def series(stat: str, site: str = "q") -> dict[int, float]:
        table = run.scalars(f"unit/{site}/adapter_{stat}")
        return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))

    norms = [np.linalg.norm(delta) for delta in deltas]
    assert list(series("norm").values()) == pytest.approx(norms)
    base = net.q.base_layer.weight.norm().item()
    assert series("drift")[3] == pytest.approx(norms[3] / base)
    changes = {step: np.linalg.norm(deltas[step] - deltas[step - 1]) / norms[step] for step in (1, 2, 3)}
    assert series("change") == pytest.approx(changes)
    sigma = np.linalg.svd(deltas[3], compute_uv=False)[:3]
    share = sigma / sigma.sum()
    assert series("rank")[3] == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    assert series("b_norm")[3] == pytest.approx(net.q.lora_B["default"].weight.norm().item())
    assert series("a_norm")[3] == pytest.approx(net.q.lora_A["default"].weight.norm().item())
    assert series("dead") == {1: 0.0, 2: 0.0, 3: 0.0}
    assert set(series("dead", "idle").values()) == {1.0}
    assert set(series("rank", "idle").values()) == {0.0}


def test_an_adapter_that_stopped_is_dead(tmp_path):
    net = Lora(6, 5, 2, 1.0)
    nn.init.ones_(net.lora_B["default"].weight)
    with sonde.init(project="p", name="n", dir=tmp_path) as session:
        session.watch(net)
        recorder = AdapterRecorder(session)
        recorder.follow(net)
        for step in range(3):
            if step == 1:
                net.lora_B["default"].weight.data[0, 0] += 1e-3
            recorder.record(step)
    dead = sonde.open("p/n", dir=tmp_path).scalars("unit/*/adapter_dead")["value"].to_pylist()
    assert dead == [0.0, 1.0]


def test_recording_changes_nothing(tmp_path):
    def train(record: bool) -> torch.Tensor:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with sonde.init(project="p", dir=tmp_path) as session:
            session.watch(net, optimizer)
            recorder = AdapterRecorder(session)
            recorder.follow(net)
            for step in range(5):
                net(torch.randn(4, 12)).square().mean().backward()
                optimizer.step()
                if record:
                    recorder.record(step)
        return torch.cat([p.detach().flatten() for p in net.parameters()] + [torch.rand(1)])

    assert torch.equal(train(True), train(False))
