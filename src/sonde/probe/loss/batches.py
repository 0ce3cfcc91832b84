"""The data set that the current batch comes from, read from the iterators of torch's `DataLoader`. Holds no data
set."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import SubsetRandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sonde.probe.guards import protected
from sonde.probe.loss.functions import FunctionTap


@dataclass(frozen=True, slots=True)
class DataSource:
    """A data set, or the part of it that a sampler draws from, known by its identity."""

    key: tuple[int, int]
    kind: tuple[str, int]
    """Its type and length: a set that is re-created for each evaluation keeps these."""
    ref: weakref.ref[Any] | None

    @property
    def is_gone(self) -> bool:
        return self.ref is not None and self.ref() is None


class BatchTap(FunctionTap):
    """Remembers where the newest batch came from, until `take` is called."""

    def __init__(self, on_error: Callable[[str, Exception], None], is_ours: Callable[[], bool] = lambda: True) -> None:
        self._is_ours = is_ours
        """Whether the calling thread may be the one whose batches are of interest."""
        self._newest: DataSource | None = None
        self._known: tuple[weakref.ref[Any], DataSource] | None = None
        """The iterator of the newest batch, and its source: `next(iter(loader))` drops its iterator at once."""
        super().__init__(_BaseDataLoaderIter, ["__next__"], protected(self._drawn, on_error, "batch"), is_traced=False)

    def _drawn(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any) -> None:
        if self._is_ours():
            iterator, known = args[0], self._known
            if known is None or known[0]() is not iterator:
                known = self._known = weakref.ref(iterator), _source(iterator)
            self._newest = known[1]

    def take(self) -> DataSource | None:
        """The source of the batch drawn since the last call; None if none was drawn."""
        newest, self._newest = self._newest, None
        return newest


def _source(iterator: Any) -> DataSource:
    data, sampler = iterator._dataset, getattr(iterator._index_sampler, "sampler", None)
    part = id(sampler) if isinstance(sampler, SubsetRandomSampler) else 0
    try:
        size = len(data)
    except Exception:  # noqa: BLE001 - the user's code; streamed data has no length
        size = -1
    ref = weakref.ref(data) if type(data).__weakrefoffset__ else None
    return DataSource((id(data), part), (type(data).__qualname__, size), ref)
