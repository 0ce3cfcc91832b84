"""WatchedModel changes no bit of parameters, optimizer state, random state or losses."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch

import sonde
from awkward import Awkward, Case, train
from sonde.testing.by_hand import digest

KEYS = ("losses", "model", "optimizer", "rng", "scale")
CHECKPOINTING = ("none", "reentrant", "non-reentrant")
OPTIMIZERS = ("sgd", "adamw-foreach", "adamw-fused")
EAGER = [
    Case(checkpointing, autocast, optimizer, scaler)
    for checkpointing, autocast, optimizer, scaler in itertools.product(
        CHECKPOINTING, (False, True), OPTIMIZERS, (False, True)
    )
]
QUICK = [
    Case(),
    Case("reentrant", autocast=True, optimizer="adamw-fused", scaler=True),
    Case("non-reentrant", optimizer="sgd", scaler=True, clip=None),
]


def check(case: Case, begin: Any) -> None:
    def watch(model: Any, optimizer: Any) -> Any:
        everything = {"activations": sonde.every(1), "activation_grads": sonde.every(1)}
        return begin(hist_every=1).watch(model, optimizer, **everything)

    bare = train(case)
    watched = train(case, watch)
    assert {key: repr(watched[key]) for key in KEYS} == {key: repr(bare[key]) for key in KEYS}
    assert watched["session"].recording.breaker.num_errors == 0
    assert watched["session"].step_number > 0, "nothing was recorded"
    for copied in (
        copy.deepcopy(watched["trained"]),
        pickle.loads(pickle.dumps(watched["trained"])),
        _saved(watched["trained"]),
    ):
        assert digest(copied.state_dict()) == watched["model"]


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_watching_changes_no_bit(case: Case, begin: Any) -> None:
    check(case, begin)


@pytest.mark.slow
@pytest.mark.parametrize("case", EAGER, ids=str)
def test_watching_changes_no_bit_in_the_whole_matrix(case: Case, begin: Any) -> None:
    check(case, begin)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("autocast", [False, True])
def test_watching_changes_no_bit_of_a_compiled_model(backend: str, autocast: bool, begin: Any) -> None:
    torch.compiler.reset()
    check(Case(autocast=autocast, compiled=backend), begin)


def test_the_hash_notices_a_single_bit() -> None:
    model = Awkward()
    before = digest(model.state_dict())
    with torch.no_grad():
        weight = model.unused.weight.view(-1)[:1]
        weight.copy_(torch.nextafter(weight, weight + 1))
    assert digest(model.state_dict()) != before
