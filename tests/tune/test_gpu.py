"""The same on a GPU: its random numbers, its copies, the scaler in half precision, the fused optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sonde.tune import CheckpointManager

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.2), nn.GELU(), nn.Linear(256, 1)).cuda()
    return net, torch.optim.AdamW(net.parameters(), fused=True), torch.amp.GradScaler("cuda", growth_interval=2)


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, num_steps: int
) -> list[float]:
    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 64, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = net(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("background", [False, True])
def test_restored_training_is_bit_identical_on_a_gpu(tmp_path, background):
    straight = train(*build(0), 20)
    net, optimizer, scaler = build(0)
    before = train(net, optimizer, scaler, 10)
    manager = CheckpointManager(tmp_path, model=net, optimizer=optimizer, scaler=scaler, background=background)
    manager.save(10)
    train(net, optimizer, scaler, 3)  # what comes after must not be in it
    manager.close()
    net, optimizer, scaler = build(5)
    CheckpointManager(tmp_path, model=net, optimizer=optimizer, scaler=scaler).restore()
    assert before + train(net, optimizer, scaler, 10) == straight
