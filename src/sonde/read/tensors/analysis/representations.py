"""CKA between snapshots: the pairs, the check that they use the same examples, and the computation.

Linear CKA measures the similarity of two representations of the same examples, regardless of width, rotation or scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sonde.errors import UsageError
from sonde.read.tensors.analysis.blocks import BlockRef, Tracked, store_at
from sonde.read.tensors.analysis.floats import as_float64
from sonde.read.tensors.readers import TensorStore
from sonde.schema.sketch import Array

BATCH: Final = 256


def representation_pairs(
    place: BlockRef, other: BlockRef | None, found: Sequence[Tracked]
) -> list[tuple[BlockRef, BlockRef, Tracked, int, int]]:
    """The pairs of snapshots of each tensor to compare: of one run, or of the same step of two runs."""
    theirs = place if other is None else other
    store = store_at(theirs)
    their_steps = None if other is None else set(store.steps)
    return [
        (place, theirs, tracked, step_a, step_b)
        for tracked in found
        for step_a, step_b in _pairs(tracked, their_steps)
        if tracked.name in store.entries(step_b)
    ]


def representation_row(
    place: BlockRef,
    other: BlockRef,
    tracked: Tracked,
    step_a: int,
    step_b: int,
    *,
    unbiased: bool,
    per_position: bool,
    check: bool,
) -> dict[str, Any]:
    """CKA of one pair of snapshots."""
    ours, theirs = store_at(place), store_at(other)
    same = _same_batch(ours, step_a, theirs, step_b, tracked.kind, is_one_run=place == other)
    if same is False and check:
        raise UsageError(_different(tracked.name, step_a, step_b))
    x = as_examples(ours.read(step_a, tracked.name), per_position=per_position)
    y = as_examples(theirs.read(step_b, tracked.name), per_position=per_position)
    if len(x) != len(y):
        raise UsageError(
            f"{tracked.name} has {len(x)} examples at step {step_a} and {len(y)} at step {step_b}, but CKA "
            "needs the same examples at both. Use a fixed batch:  Snapshots(probe=batch)"
        )
    value = unbiased_cka(x, y) if unbiased else linear_cka(x, y)
    return {
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


def _same_batch(
    ours: TensorStore, step_a: int, theirs: TensorStore, step_b: int, kind: str, *, is_one_run: bool
) -> bool | None:
    """Whether two batches are equal, by their stored checksums; None if unknown. A run's probe batch never changes."""
    if kind == "probe":
        return True if is_one_run else None
    batches = [
        {
            name: (entry.shape, entry.dtype, entry.crc32c)
            for name, entry in store.entries(step).items()
            if name.startswith("batch/")
        }
        for store, step in ((ours, step_a), (theirs, step_b))
    ]
    return batches[0] == batches[1] if all(batches) else None


def _different(name: str, step_a: int, step_b: int) -> str:
    return (
        f"{name} comes from different batches at steps {step_a} and {step_b}, but CKA needs the same examples at both. "
        "Use a fixed batch with  Snapshots(probe=batch)  and select probe/*, or turn the check off with "
        "check=False."
    )


def as_examples(activations: NDArray[Any], *, per_position: bool = False) -> Array:
    """Reshape to (examples, features): one row per example of the batch, or per position with `per_position`.

    `per_position` keeps the last axis as features: tokens of (batch, time, width).
    """
    values = as_float64(activations)
    if values.ndim < 2:
        return values.reshape(-1, 1)
    return values.reshape(-1, values.shape[-1]) if per_position else values.reshape(values.shape[0], -1)


def linear_cka(x: Array, y: Array) -> float:
    """CKA of Kornblith et al. 2019: ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) of centred features; 1 if only rotation or scale differ.

    It is biased upwards with fewer examples than features; `unbiased_cka` is not. NaN for a constant representation.
    Cost: n·p·q, or n²·(p + q) with fewer examples than features.
    """
    x, y = x - x.mean(0), y - y.mean(0)
    if len(x) < max(x.shape[1], y.shape[1]):
        k, m = x @ x.T, y @ y.T
        cross, own = float((k * m).sum()), float(np.linalg.norm(k) * np.linalg.norm(m))
    else:
        cross = float(np.square(y.T @ x).sum())
        own = float(np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    return cross / own if own > 0 else float("nan")


def unbiased_hsic(k: Array, m: Array) -> float:
    """Unbiased HSIC of two Gram matrices (Song et al. 2012, equation 5); needs at least four examples."""
    n = len(k)
    k, m = k.copy(), m.copy()
    np.fill_diagonal(k, 0.0)
    np.fill_diagonal(m, 0.0)
    sums = k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2.0 * (k.sum(0) @ m.sum(0)) / (n - 2)
    return float(((k * m).sum() + sums) / (n * (n - 3)))


def unbiased_cka(x: Array, y: Array, batch: int = BATCH) -> float:
    """CKA from unbiased HSIC averaged over batches of examples (Nguyen, Raghu and Kornblith 2021).

    Memory is that of one batch's Gram matrix; the batch size does not bias the estimate. May be slightly negative for
    unrelated representations. A remainder of fewer than four examples is left out.
    """
    sums = np.zeros(3)
    for start in range(0, len(x), batch):
        one, two = x[start : start + batch], y[start : start + batch]
        if len(one) < 4:
            continue
        k, m = one @ one.T, two @ two.T
        sums += [unbiased_hsic(k, m), unbiased_hsic(k, k), unbiased_hsic(m, m)]
    cross, own = float(sums[0]), float(sums[1] * sums[2])
    return cross / float(np.sqrt(own)) if own > 0 else float("nan")
