"""CKA between snapshots: which pairs, whether they are of the same examples, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sonde.errors import UsageError
from sonde.read.tensors.analysis.blocks import BlockRef, Tracked, lake_at
from sonde.read.tensors.analysis.cka import as_examples, linear_cka, unbiased_cka
from sonde.read.tensors.readers import Lake


def representation_rows(
    place: BlockRef,
    other: BlockRef | None,
    found: Sequence[Tracked],
    *,
    unbiased: bool,
    per_position: bool,
    check: bool,
) -> Iterator[dict[str, Any]]:
    """One row per pair of snapshots of each tensor: of one run, or of the same step of two."""
    ours = lake_at(place)
    theirs = ours if other is None else lake_at(other)
    their_steps = set(theirs.steps)
    for tracked in found:
        for step_a, step_b in _pairs(tracked, None if other is None else their_steps):
            if tracked.name not in theirs.entries(step_b):
                continue
            same = _same_batch(ours, step_a, theirs, step_b, tracked.kind)
            if same is False and check:
                raise UsageError(_different(tracked.name, step_a, step_b))
            x = as_examples(ours.read(step_a, tracked.name), per_position=per_position)
            y = as_examples(theirs.read(step_b, tracked.name), per_position=per_position)
            if len(x) != len(y):
                raise UsageError(
                    f"{tracked.name} has {len(x)} examples at step {step_a} and {len(y)} at step {step_b}; CKA "
                    "compares what is made of the same examples. Keep a fixed batch:  Snapshots(probe=batch)"
                )
            value = unbiased_cka(x, y) if unbiased else linear_cka(x, y)
            yield {
                "tensor": tracked.name,
                "step_a": step_a,
                "step_b": step_b,
                "cka": None if np.isnan(value) else value,
                "num_examples": len(x),
                "same_batch": same,
            }


def _pairs(tracked: Tracked, theirs: set[int] | None) -> list[tuple[int, int]]:
    if theirs is not None:
        return [(step, step) for step in tracked.steps if step in theirs]
    return [(a, b) for i, a in enumerate(tracked.steps) for b in tracked.steps[i + 1 :]]


def _same_batch(ours: Lake, step_a: int, theirs: Lake, step_b: int, kind: str) -> bool | None:
    """By the checksums of the batches that were kept; None where none was. A run's probe batch is always the same."""
    if kind == "probe":
        return True if ours is theirs else None
    batches = [
        {
            name: (entry.shape, entry.dtype, entry.crc32c)
            for name, entry in lake.entries(step).items()
            if name.startswith("batch/")
        }
        for lake, step in ((ours, step_a), (theirs, step_b))
    ]
    return batches[0] == batches[1] if all(batches) else None


def _different(name: str, step_a: int, step_b: int) -> str:
    return (
        f"{name} was made from different batches at steps {step_a} and {step_b}: CKA compares what is made of the same "
        "examples. Keep a fixed batch with  Snapshots(probe=batch)  and ask for probe/*, or switch the check off with "
        "check=False."
    )
