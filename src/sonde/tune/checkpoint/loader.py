"""A wrapper for a plain DataLoader that knows its position and can return to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from sonde.tune.checkpoint.rng import put_generator, put_rng, take_generator, take_rng


class ResumableLoader:
    """Wraps a `DataLoader`; pass it to `CheckpointManager(dataloader=…)` and iterate over it as before.

        loader = ResumableLoader(DataLoader(dataset, batch_size=32, shuffle=True, num_workers=4))
        for epoch in range(loader.epoch, num_epochs):
            for batch in loader:
                ...

    The position is an epoch, a number of batches, and the random states at the start of the epoch, from which the same
    order is drawn again. Batches that were already trained on are skipped: without workers only their indices are
    drawn; workers load them again, so that their own random numbers continue as they would have.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.epoch = 0
        self.batch = 0
        """Batches returned in this epoch."""
        self._start: dict[str, Any] | None = None
        self._is_restored = False

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """`dataset`, `batch_size` and so on are the loader's."""
        if name == "loader":  # while being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._restored() if self._is_restored else self._fresh()
        for batch in iterator:
            self.batch += 1
            yield batch
        self.epoch, self.batch, self._start = self.epoch + 1, 0, None

    def _fresh(self) -> Iterator[Any]:
        self.batch = 0
        self._start = {"rng": take_rng(), "generators": {n: take_generator(g) for n, g in self._generators().items()}}
        return iter(self.loader)

    def _restored(self) -> Iterator[Any]:
        """The rest of an epoch: its start is drawn again from the same random states."""
        self._is_restored = False
        if self._start is None:
            return self._fresh()
        now = take_rng()
        put_rng(self._start["rng"])
        for name, generator in self._generators().items():
            if name in self._start["generators"]:
                put_generator(generator, self._start["generators"][name])
        sampler = self.loader.sampler
        if hasattr(sampler, "set_epoch") and self._start.get("sampler_epoch") is not None:
            sampler.set_epoch(self._start["sampler_epoch"])
        iterator = iter(self.loader)
        self._pass_over(iterator)
        put_rng(now)
        return iterator

    def _pass_over(self, iterator: Iterator[Any]) -> None:
        indices = getattr(iterator, "_sampler_iter", None)
        is_cheap = self.loader.num_workers == 0 and not isinstance(self.loader.dataset, IterableDataset)
        if is_cheap and indices is not None:
            iterator = indices
        for _ in range(self.batch):
            next(iterator, None)

    def _generators(self) -> dict[str, Any]:
        """The random states of the loader and its samplers; the global ones are stored separately."""
        owners = {
            "loader": self.loader,
            "sampler": self.loader.sampler,
            "batch_sampler": self.loader.batch_sampler,
            "inner": getattr(self.loader.batch_sampler, "sampler", None),
        }
        found = {name: getattr(owner, "generator", None) for name, owner in owners.items()}
        return {name: generator for name, generator in found.items() if generator is not None}

    def state_dict(self) -> dict[str, Any]:
        start = self._start
        if start is not None:
            start = {**start, "sampler_epoch": getattr(self.loader.sampler, "epoch", None)}
        return {"epoch": self.epoch, "batch": self.batch, "start": start, "num_batches": _length(self.loader)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from sonde.errors import UsageError

        if state["num_batches"] != _length(self.loader):
            raise UsageError(
                f"the checkpoint was saved with {state['num_batches']} batches per epoch, but this loader has "
                f"{_length(self.loader)}: the data set or batch size differs, so its position does not apply. Restore "
                "without dataloader=."
            )
        self.epoch, self.batch, self._start = state["epoch"], state["batch"], state["start"]
        self._is_restored = True


def _length(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an iterable data set
        return None
