"""Execution of block-wise tasks, sequentially here or on a Dask cluster. The results are the same."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sonde.errors import UsageError
from sonde.schema.packages import require

Answer = TypeVar("Answer")


def spread(task: Callable[..., Answer], calls: Sequence[tuple[Any, ...]], cluster: Any = None) -> Iterator[Answer]:
    """Results in the order of the calls. `cluster` is a Dask client; an active one is used automatically.

    A worker opens the run's folder by its path, so it must have access to the same files.
    """
    client = _client(cluster)
    if client is None:
        return (task(*call) for call in calls)
    if not calls:
        return iter(())
    # pure=False: with the same arguments, a running run may have more snapshots a minute later.
    futures = client.map(task, *zip(*calls, strict=True), pure=False)
    return (future.result() for future in futures)


def _client(cluster: Any) -> Any:
    if cluster is None:
        return _active_client()
    if not isinstance(cluster, require("distributed", "dask", "analysis on a cluster").Client):
        raise UsageError(f"cluster must be a dask.distributed.Client, not {type(cluster).__name__}.")
    return cluster


def _active_client() -> Any:
    distributed = sys.modules.get("distributed")  # if it is not imported, no client is active
    if distributed is None:
        return None
    try:
        return distributed.default_client()
    except ValueError:
        return None
