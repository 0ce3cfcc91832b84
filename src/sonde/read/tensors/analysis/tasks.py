"""Tasks for workers: one block of one tensor, or one tensor of one snapshot, opened by its location."""

from __future__ import annotations

from typing import Any

import numpy as np

from sonde.read.tensors.analysis.blocks import BlockRef, Rows, Tracked, read_block, store_at
from sonde.read.tensors.analysis.distribution import distribution, sample
from sonde.read.tensors.analysis.evolution import evolution_columns, evolution_sums
from sonde.read.tensors.analysis.similarity import gram
from sonde.read.tensors.analysis.spectra import spectrum_row
from sonde.read.tensors.analysis.tables import split_names
from sonde.schema.sketch import Array


def evolution_block(place: BlockRef, tracked: Tracked, rows: Rows) -> Array:
    return evolution_sums(read_block(place, step, tracked.name, rows) for step in tracked.steps)


def gram_block(place: BlockRef, tracked: Tracked, rows: Rows) -> Array:
    return gram([read_block(place, step, tracked.name, rows) for step in tracked.steps])


def spectrum_at(place: BlockRef, name: str, step: int, k: int, exact: bool | None, seed: int) -> dict[str, Any]:
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
