"""Block-wise tasks, opened by the location of their tensors, and their execution here or on a Dask cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from sonde.errors import UsageError
from sonde.read.tensors.analysis.blocks import BlockRef, Rows, Tracked, read_block, store_at
from sonde.read.tensors.analysis.distribution import distribution, sample
from sonde.read.tensors.analysis.evolution import evolution_columns, evolution_sums
from sonde.read.tensors.analysis.similarity import gram
from sonde.read.tensors.analysis.spectra import spectrum_row
from sonde.read.tensors.analysis.tables import split_names
from sonde.schema.packages import require
from sonde.schema.sketch import Array


def evolution_block(place: BlockRef, tracked: Tracked, rows: Rows) -> Array:
    return evolution_sums(read_block(place, step, tracked.name, rows) for step in tracked.steps)


def gram_block(place: BlockRef, tracked: Tracked, rows: Rows) -> Array:
    return gram([read_block(place, step, tracked.name, rows) for step in tracked.steps])


def spectrum_at(place: BlockRef, name: str, step: int, k: int | None, exact: bool | None, seed: int) -> dict[str, Any]:
    return spectrum_row(store_at(place).read(step, name), k, exact=exact, seed=seed)


def standing_row(place: BlockRef, name: str, steps: tuple[int, ...], spectra: bool) -> dict[str, Any]:
    arrays = [store_at(place).read(step, name) for step in steps]
    columns = evolution_columns(evolution_sums(arrays))
    moved = {column: None if np.isnan(values[-1]) else float(values[-1]) for column, values in columns.items()}
    return {"step": steps[-1], **split_names(name), **moved, **(spectrum_row(arrays[-1]) if spectra else {})}


def distribution_rows(place: BlockRef, tracked: Tracked, bins: int, limit: int) -> list[dict[str, Any]]:
    samples, sizes = [], []
    for step in tracked.steps:
        blocks = tracked.blocks()
        parts = [sample(read_block(place, step, tracked.name, rows), max(1, limit // len(blocks))) for rows in blocks]
        samples.append(np.concatenate(parts))
        sizes.append(int(np.prod(tracked.shapes[tracked.steps.index(step)])))
    rows = distribution(samples, bins)
    return [
        {"step": step, **split_names(tracked.name), **row, "num_sampled": values.size, "num_elements": size}
        for step, row, values, size in zip(tracked.steps, rows, samples, sizes, strict=True)
    ]


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
