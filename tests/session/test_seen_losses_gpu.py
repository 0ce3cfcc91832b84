"""On a GPU: losses that no one logs are the program's own, and the host never waits for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sonde.schema.losses import SEEN_TRAINING, SEEN_VALIDATION

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def series(run: Any, name: str) -> dict[int, float]:
    table = run.scalars(name)
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_losses_are_the_programs_own_and_nothing_waits(begin: Any, reopen: Any, is_scaled: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=is_scaled)
    begin().watch(net, optimizer)
    x, y = torch.randn(96, 64, device="cuda"), torch.randint(0, 8, (96,), device="cuda")
    losses: list[list[torch.Tensor]] = []
    held_out: dict[int, list[torch.Tensor]] = {}
    for step in range(12):
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        losses.append([])
        for at in range(0, 48, 16):
            with torch.autocast("cuda", torch.float16 if is_scaled else torch.bfloat16):
                loss = F.cross_entropy(net(x[at : at + 16]), y[at : at + 16])
            losses[-1].append(loss.detach().clone())
            scaler.scale(loss / 3).backward()
        torch.cuda.set_sync_debug_mode("default" if is_scaled else "error")  # a scaler waits for the device itself
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        if step % 4 == 3:
            with torch.inference_mode():
                held_out[step] = [F.cross_entropy(net(x[a:b]), y[a:b]) for a, b in ((48, 80), (80, 96))]
    torch.cuda.set_sync_debug_mode("default")
    run = reopen()
    printed = {step: sum(one.item() for one in micro) / 3 for step, micro in enumerate(losses)}
    assert series(run, SEEN_TRAINING) == pytest.approx(printed, rel=1e-5)
    validated = {step: (a.item() * 32 + b.item() * 16) / 48 for step, (a, b) in held_out.items()}
    assert series(run, SEEN_VALIDATION) == pytest.approx(validated, rel=1e-5)
    assert run.warnings == []
