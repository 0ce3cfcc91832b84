"""Where block-wise tasks run: here, one after the other, or on a Dask cluster. The answers are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sonde.errors import UsageError
from sonde.schema.packages import require

Answer = TypeVar("Answer")


def spread(task: Callable[..., Answer], calls: Sequence[tuple[Any, ...]], cluster: Any = None) -> Iterator[Answer]:
    """The answers in the order of the calls. `cluster` is a Dask client; an active one is used without being named.

    A worker opens the run's folder by its path: it must see the same files.
    """
    client = _client(cluster)
    if client is None:
        return (task(*call) for call in calls)
    if not calls:
        return iter(())
    # pure=False: a live run has more snapshots a minute later under the same arguments.
    futures = client.map(task, *zip(*calls, strict=True), pure=False)
    return (future.result() for future in futures)


def _client(cluster: Any) -> Any:
    if cluster is None:
        return _active_client()
    if not isinstance(cluster, require("distributed", "dask", "Analysis on a cluster").Client):
        raise UsageError(f"cluster is a dask.distributed.Client; got {type(cluster).__name__}.")
    return cluster


def _active_client() -> Any:
    distributed = sys.modules.get("distributed")  # not imported means not active: nothing is imported to find out
    if distributed is None:
        return None
    try:
        return distributed.default_client()
    except ValueError:
        return None
