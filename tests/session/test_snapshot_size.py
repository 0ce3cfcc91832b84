"""What a snapshot will take is known before training: compared with what torch's optimizers make when they step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import sonde
from sonde.session.snapshots.size import expected_bytes

ALL = ("param", "grad", "act", "optim", "batch")
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "foreach": True}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adadelta, {}),
    (optim.Adagrad, {}),
    (optim.ASGD, {}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.Adafactor, {}),
    (optim.LBFGS, {"max_iter": 1}),
]


class Other(optim.AdamW):
    """May do whatever it likes."""


@pytest.mark.parametrize(("kind", "options"), [*OPTIMIZERS, (Other, {})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_known_before_it_exists(begin: Any, kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Linear(64, 32, dtype=dtype), nn.BatchNorm1d(32, dtype=dtype), nn.Linear(32, 8, dtype=dtype)
    )
    model[2].weight.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    session = begin()
    session.watch(model, optimizer, snapshots=sonde.Snapshots(kinds=ALL, store="memory", when=sonde.every(1)))
    (followed,) = session.steps.snapshots._followed.values()
    before = expected_bytes(followed.gather, ALL)

    def loss() -> Any:
        optimizer.zero_grad()
        value = model(torch.randn(16, 64, dtype=dtype)).square().mean()
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)
    assert session.flush(30)
    taken = {"param": 0, "grad": 0, "optim": 0, "act": 0, "batch": 0}
    for name, tensor in session.steps.snapshots._writer._store.read(1).tensors.items():
        taken[name.partition("/")[0]] += tensor.nbytes
    assert (before["param"], before["grad"]) == (taken["param"], taken["grad"])
    assert before["optim"] <= taken["optim"], "what would fit must not be refused"
    if kind not in (Other, optim.Adafactor, optim.LBFGS):
        assert taken["optim"] - before["optim"] <= 3 * 4 * len(list(model.parameters()))  # counters of steps
    assert expected_bytes(followed.gather, ALL)["optim"] == taken["optim"]


def test_only_what_is_wanted_counts(begin: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
    session = begin()
    chosen = sonde.Snapshots(kinds=("param", "optim"), sites=nn.LayerNorm, store="memory")
    optimizer = optim.AdamW(model.parameters())
    session.watch(model, optimizer, snapshots=chosen)
    (followed,) = session.steps.snapshots._followed.values()
    assert expected_bytes(followed.gather, ("param", "optim")) == {"param": 2 * 32 * 4, "optim": 2 * 2 * 32 * 4}
