"""A small model with everything that trips an observer, trained in every configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sonde.testing.by_hand import digest


class Block(nn.Module):
    """Two linear layers with an in-place activation and dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.drop(self.relu(self.up(self.norm(x)))))
        return out


class Awkward(nn.Module):
    """A shared block under two names, a tied head, a dict output, and a parameter that gets no gradient."""

    def __init__(self, width: int = 16, vocabulary: int = 11, checkpointing: str = "none") -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.first = Block(width)
        self.second = Block(width)
        self.again = self.first
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.checkpointing = checkpointing

    def block(self, block: nn.Module, x: Tensor) -> Any:
        if self.checkpointing == "none":
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.embed(tokens)
        for block in (self.first, self.second, self.again):
            x = self.block(block, x)
        return {"logits": self.head(x), "hidden": [x], "note": "not a tensor", "nothing": None}


@dataclass
class Case:
    """One training configuration of the matrix."""

    checkpointing: str = "none"
    autocast: bool = False
    optimizer: str = "adamw-foreach"
    scaler: bool = False
    compiled: str = ""
    accumulate: int = 2
    clip: float | None = 1.0
    steps: int = 4


def make_optimizer(kind: str, params: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-3, foreach=kind == "adamw-foreach", fused=kind == "adamw-fused")


def train(case: Case, watch: Any = None) -> dict[str, Any]:
    """Train, and tell everything that must not depend on being watched. `watch(model, optimizer)` starts watching."""
    torch.manual_seed(0)
    model = Awkward(checkpointing=case.checkpointing)
    optimizer = make_optimizer(case.optimizer, model.parameters())
    called: Any = torch.compile(model, backend=case.compiled) if case.compiled else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.scaler)
    session = watch(model, optimizer) if watch is not None else None
    losses = []
    loss = torch.zeros(())
    for step in range(case.steps):
        optimizer.zero_grad(set_to_none=True)
        for _ in range(case.accumulate):
            tokens = torch.randint(0, 11, (4, 6))
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                logits = called(tokens)["logits"]
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()) / case.accumulate
            if case.scaler and step == 1:
                loss = loss * torch.tensor(float("inf"))  # this step must be skipped
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if case.clip is not None:
            if case.scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        if session is not None:
            session.log({"loss": loss})
    return {
        "losses": losses,
        "model": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "rng": digest(torch.get_rng_state()),
        "scale": scaler.get_scale() if case.scaler else None,
        "trained": model,
        "session": session,
    }
