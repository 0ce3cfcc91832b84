"""Snapshots of every kind at every step change no bit of what is trained."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sonde
from awkward import Case, train
from sonde.testing.by_hand import digest

KEYS = ("losses", "model", "optimizer", "rng", "scale")
QUICK = [
    Case(),
    Case("reentrant", autocast=True, optimizer="adamw-fused", scaler=True),
    Case("non-reentrant", optimizer="sgd", scaler=True, clip=None),
]
WHOLE = [
    Case(checkpointing, autocast, optimizer, scaler)
    for checkpointing, autocast, optimizer, scaler in itertools.product(
        ("none", "reentrant", "non-reentrant"), (False, True), ("sgd", "adamw-foreach", "adamw-fused"), (False, True)
    )
]


def everything(**options: Any) -> sonde.Snapshots:
    return sonde.Snapshots(**{"when": sonde.every(1), "kinds": "all", "store": "memory", **options})


def check(case: Case, begin: Any) -> None:
    def watch(model: Any, optimizer: Any) -> Any:
        probe = torch.arange(24).reshape(4, 6) % 11
        return begin().watch(model, optimizer, snapshots=everything(probe=probe))

    bare, watched = train(case), train(case, watch)
    assert {key: repr(watched[key]) for key in KEYS} == {key: repr(bare[key]) for key in KEYS}
    session = watched["session"]
    assert session.flush(30)
    assert session.recording.breaker.num_errors == 0
    assert session.steps.snapshots.ledger.counts["taken"] == session.step_number + 1
    last = session.steps.snapshots._writer._store.read(session.step_number)
    kinds = {name.partition("/")[0] for name in last.tensors}
    assert kinds >= {"param", "grad", "optim", "probe"} | (set() if case.compiled else {"act", "batch"})


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_snapshots_change_no_bit(case: Case, begin: Any) -> None:
    check(case, begin)


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_snapshots_change_no_bit_in_the_whole_matrix(case: Case, begin: Any) -> None:
    check(case, begin)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_snapshots_change_no_bit_of_a_compiled_model(backend: str, begin: Any) -> None:
    torch.compiler.reset()
    check(Case(compiled=backend), begin)


class Norms(nn.Module):
    """Batch norm, dropout, an in-place activation, an embedding that rescales its rows as it is used, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, max_norm=1.0)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(8, 2)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y: Tensor = self.out(self.drop(self.act(self.norm(self.embed(x)))))
        return y


def run(begin: Any = None, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(3)
    model = Norms()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = None if begin is None else begin()
    if session is not None:
        probe = torch.arange(11)
        session.watch(model, optimizer, snapshots=everything(probe=probe, **options))
    losses = []
    for _ in range(5):
        for _ in range(2):
            loss = model(torch.randint(0, 11, (6,))).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if session is not None:
        assert session.flush(30)
        assert session.steps.snapshots.ledger.counts == {"taken": 5, "skipped": 0, "failed": 0}
        assert session.recording.breaker.num_errors == 0
    rng = digest(torch.get_rng_state()), repr(np.random.get_state()[1][:4])  # type: ignore[index] # noqa: NPY002
    return losses, digest(model.state_dict()), digest(optimizer.state_dict()), rng, model.num_calls, model.training


@pytest.mark.parametrize("at_once", [False, True])
def test_norms_dropout_counters_and_rescaled_embeddings_do_not_notice(at_once: bool, begin: Any) -> None:
    assert run(begin, at_once=at_once) == run()


def test_statistics_are_the_same_with_and_without_snapshots(begin: Any) -> None:
    found = []
    for snapshots in (None, everything(probe=torch.arange(11))):
        torch.manual_seed(3)
        model, session = Norms(), begin()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        session.watch(model, optimizer, snapshots=snapshots)
        for _ in range(4):
            model(torch.randint(0, 11, (6,))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.finish()
        rows = sonde.open(session.path).stats("*").to_pylist()
        found.append({(r["step"], r["kind"], r["site"], r["stat"]): repr(r["value"]) for r in rows})
    assert found[0] == found[1]
