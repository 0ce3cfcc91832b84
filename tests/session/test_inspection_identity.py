"""Inspecting everything at every step changes no bit of parameters, optimizer state, random state or losses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import sonde
from awkward import Case
from awkward import train as train_awkward
from sonde.testing.by_hand import digest


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(F.relu(self.a(x), inplace=True))))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(72, 4),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.LayerNorm(8), how
        self.mha = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.how.startswith("mha"):
            return x + self.mha(h, h, h, attn_mask=mask, need_weights=self.how == "mha-weights")[0]
        q, k, v = (t.transpose(1, 2) for t in self.qkv(h).unflatten(-1, (3, 2, 4)).unbind(2))
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        else:
            y = self.drop(F.softmax((q @ k.transpose(-1, -2) / 2).masked_fill(mask, -torch.inf), dim=-1)) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


class Gpt(nn.Module):
    def __init__(self, how: str, checkpointing: str = "none") -> None:
        super().__init__()
        self.embed, self.head, self.checkpointing = nn.Linear(6, 8), nn.Linear(8, 4), checkpointing
        self.blocks = nn.ModuleList([Block(how) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            if self.checkpointing == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(x)


class Lstm(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.cell, self.head, self.checkpointing = nn.GRUCell(8, 8), nn.Linear(8, 4), checkpointing

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointing:
            out = checkpoint(lambda x: self.rnn(x)[0], x, use_reentrant=False)
        else:
            out = self.rnn(x)[0]
        h = out.new_zeros(len(x), 8)
        for t in range(x.shape[1]):
            h = self.cell(out[:, t], h)
        return self.head(h)


def flat(batch: int = 8) -> Tensor:
    return torch.randn(batch, 6)


def sequence() -> Tensor:
    return torch.randn(4, 9, 6)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (Mlp, flat),
    "cnn": (cnn, lambda: torch.randn(4, 1, 8, 8)),
    "lstm": (Lstm, sequence),
    "lstm-checkpoint": (lambda: Lstm(checkpointing=True), sequence),
    **{f"gpt-{how}": ((lambda how=how: Gpt(how)), sequence) for how in ("explicit", "sdpa", "mha", "mha-weights")},
    **{
        f"gpt-{how}-{kind}": ((lambda how=how, kind=kind: Gpt(how, kind)), sequence)
        for how in ("explicit", "sdpa")
        for kind in ("reentrant", "non-reentrant")
    },
}


def train(name: str, begin: Any, *, autocast: bool = False, compiled: str = "") -> dict[str, Any]:
    torch.manual_seed(0)
    build, batch = CASES[name]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called = torch.compile(model, backend=compiled, fullgraph=True) if compiled else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, enabled=autocast)
    session = begin().watch(model, optimizer, inspect=sonde.every(1)) if begin is not None else None
    losses = []
    for _ in range(7):
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = called(batch()).float().square().mean()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    if session is not None:
        assert session.recording.breaker.num_errors == 0
        assert session.step_number >= 6
        copied = copy.deepcopy(model)
        assert digest(pickle.loads(pickle.dumps(model)).state_dict()) == digest(copied.state_dict())
    return {
        "losses": repr(losses),
        "model": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "rng": digest(torch.get_rng_state()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_inspecting_changes_no_bit(name, autocast, begin):
    assert train(name, begin, autocast=autocast) == train(name, None, autocast=autocast)


@pytest.mark.parametrize(
    "case", [Case(), Case("non-reentrant", autocast=True, scaler=True), Case("reentrant")], ids=str
)
def test_inspecting_changes_no_bit_of_an_awkward_model(case, begin):
    bare = train_awkward(case)
    watched = train_awkward(case, lambda m, o: begin().watch(m, o, inspect=sonde.every(1)))
    assert watched["session"].recording.breaker.num_errors == 0
    for key in ("losses", "model", "optimizer", "rng", "scale"):
        assert watched[key] == bare[key], key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["mlp", "gpt-explicit", "gpt-sdpa"])
def test_a_compiled_model_stays_one_graph(name, begin):
    torch.compiler.reset()
    counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        watched = train(name, begin, compiled="aot_eager")
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["graph_break"]) == {}
    torch.compiler.reset()
    counters.clear()
    assert train(name, None, compiled="aot_eager") == watched
    torch.compiler.reset()
    counters.clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_model_with_a_compiled_block_is_not_compiled_again(begin):
    torch.compiler.reset()
    counters.clear()
    model = Gpt("explicit")
    model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer, inspect=sonde.every(2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(5):
            model(sequence()).sum().backward()
            optimizer.step()
    assert session.recording.breaker.num_errors == 0
    torch.compiler.reset()
    counters.clear()
