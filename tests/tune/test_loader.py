"""`ResumableLoader` continues with the next batch, whatever draws the order."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler

from sonde.tune import CheckpointManager, ResumableLoader
from sonde.tune.checkpoint.tree import Encoder, decode


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randperm(12).tolist())


def make(kind: str, seed: int) -> DataLoader:
    data = list(range(12))
    generator = torch.Generator().manual_seed(seed)
    if kind == "global":
        return DataLoader(data, 2, shuffle=True)
    if kind == "generator":
        return DataLoader(data, 2, shuffle=True, generator=generator)
    if kind == "sampler":
        return DataLoader(data, 2, sampler=RandomSampler(data, generator=generator))
    if kind == "weighted":
        return DataLoader(data, 2, sampler=WeightedRandomSampler([1.0] * 12, 12, generator=generator))
    if kind == "distributed":
        return DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=1))
    if kind == "iterable":
        return DataLoader(Stream(), 2)
    return DataLoader(data, 2)


def batches(loader: ResumableLoader, num_epochs: int, stop: int | None = None) -> list[Any]:
    """(epoch, batch) until `stop` batches were seen; something else draws random numbers in between."""
    found: list[Any] = []
    for epoch in range(loader.epoch, num_epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            found.append((epoch, batch.tolist()))
            torch.rand(3)
            if len(found) == stop:
                return found
    return found


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(Encoder().encode(value, ""))), {})


@pytest.mark.parametrize("kind", ["global", "generator", "sampler", "weighted", "distributed", "iterable", "in order"])
@pytest.mark.parametrize("stop", [1, 4, 6, 9])
def test_the_rest_is_the_same(kind, stop):
    torch.manual_seed(0)
    straight = batches(ResumableLoader(make(kind, 5)), 3)

    torch.manual_seed(0)
    first = ResumableLoader(make(kind, 5))
    before = batches(first, 3, stop)
    state, random_state = through_json(first.state_dict()), torch.get_rng_state()

    torch.manual_seed(99)
    second = ResumableLoader(make(kind, 77))
    second.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert before + batches(second, 3) == straight


def test_a_loader_with_its_own_state_is_used_as_it_is(tmp_path):
    class Stateful:
        """As torchdata's StatefulDataLoader."""

        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict:
            return {"at": self.at, "_worker": {0: torch.arange(3)}, "none": None}

        def load_state_dict(self, state: dict) -> None:
            assert torch.equal(state["_worker"][0], torch.arange(3))
            self.at = state["at"]

    loader = Stateful()
    loader.at = 7
    CheckpointManager(tmp_path, dataloader=loader).save(1)
    loader.at = 0
    CheckpointManager(tmp_path, dataloader=loader).restore()
    assert loader.at == 7


def test_it_looks_like_what_it_wraps():
    loader = ResumableLoader(DataLoader(list(range(10)), batch_size=4))
    assert (len(loader), loader.batch_size, list(loader.dataset)) == (3, 4, list(range(10)))
    for _ in loader:
        break
    assert (loader.epoch, loader.batch) == (0, 1)
    assert sum(1 for _ in loader) == 3  # an epoch that was left starts over
    assert (loader.epoch, loader.batch) == (1, 0)
