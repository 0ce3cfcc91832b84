"""On a GPU: a value that stops being finite is named, the host never waits, and no activation lives longer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sonde.reduce.inspect import finite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
AT = 6


class Block(nn.Module):
    """Pre-norm, with a residual: what is added to it is freed at once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(256) for _ in range(3)), nn.Linear(256, 8)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        y: Tensor = self.head(x)
        return y


def plant(module: nn.Module, value: float, is_on: list[bool]) -> None:
    forward = module.forward

    def spoiled(x: Tensor) -> Tensor:
        y: Tensor = forward(x)
        if is_on[0]:
            y.data[17, 3] = value
        return y

    module.forward = spoiled


def events(run: Any) -> list[dict[str, Any]]:
    rows = run.events().to_pylist()
    return [{**row, **json.loads(row["details"])} for row in rows if row["type"] == "nonfinite"]


@pytest.mark.parametrize("is_small", [False, True], ids=["two stages", "one stage"])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["blocks.0.norm", "blocks.1.up", "blocks.1.act", "blocks.2.down", "head"])
def test_the_module_is_named_and_nothing_waits(
    begin: Any, reopen: Any, monkeypatch: pytest.MonkeyPatch, name: str, is_checkpointed: bool, is_small: bool
) -> None:
    monkeypatch.setattr(finite, "AT_ONCE_BYTES", 1 << 40 if is_small else 0)
    torch.manual_seed(0)
    net, is_on = Net(is_checkpointed).cuda(), [False]
    plant(net.get_submodule(name), math.nan, is_on)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    begin(live_rules=False).watch(net, optimizer, activations=False, inspect=False)
    x = torch.randn(2048, 256, device="cuda")
    try:
        for step in range(AT + 2):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            for micro_batch in range(2):
                is_on[0] = step == AT and micro_batch == 1
                with torch.autocast("cuda", torch.bfloat16):
                    loss = net(x).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    first = events(reopen())[0]
    assert (first["step"], first["micro_batch"]) == (AT, 1)
    assert (first["suspect"] or first["site"]) == name


def test_infinity_that_stays_inside_is_not_an_event(begin: Any, reopen: Any) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(256, 256), nn.Linear(256, 8)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(256, device=x.device).index_fill(0, torch.arange(4, device=x.device), -math.inf)
            y: Tensor = self.b(torch.softmax(self.a(x) + mask, -1))
            return y

    net = Masked().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    begin().watch(net, optimizer)
    for _ in range(5):
        net(torch.randn(512, 256, device="cuda")).square().mean().backward()
        optimizer.step()
    assert events(reopen()) == []


def test_no_activation_lives_longer(begin: Any) -> None:
    net = Net(is_checkpointed=False).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(8192, 256, device="cuda")

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()

    before = peak()
    begin(live_rules=False).watch(net, optimizer, activations=False, inspect=False, params=False, updates=False)
    peak()
    assert peak() <= before + (8 << 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_element_is_enough_in_every_type(dtype: torch.dtype, bad: float) -> None:
    good = torch.full((300, 300), 3.0, device="cuda").to(dtype)
    xs = [good.clone() for _ in range(4)]
    xs[1][17, 5] = bad
    xs[3][299, 299] = bad
    found = finite.scan([*xs, None], [3], [0, 1, 2], 0)
    assert found is not None
    assert str(finite.send([found])()[0]) == str([0.0, bad, 0.0, bad, None])
