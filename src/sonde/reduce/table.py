"""The sketches of one step as a table, on the host or being copied there, and operations on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sonde.reduce.exponents import histograms
from sonde.reduce.transfer import HostTransfer
from sonde.schema.sketch import (
    HIST_N,
    MAX,
    MIN,
    SUM,
    SUMABS,
    SUMSQ,
    SUMSQ_RAW,
    ZERO,
    Array,
    N,
    empty_hist,
    empty_rows,
    merge_groups,
)


@dataclass(slots=True)
class Check:
    """A comparison with the actual values, made on the device: (T, 2), squared errors and the allowed ones."""

    errors: Tensor
    on_wrong: Callable[[list[int], float], None]
    """Called with the keys of the wrong rows, and the worst ratio of error to tolerance."""

    def good_rows(self, errors: Array, keys: NDArray[np.int32]) -> NDArray[np.bool_]:
        wrong: NDArray[np.bool_] = errors[:, 0] > errors[:, 1]
        if wrong.any():
            with np.errstate(divide="ignore"):
                worst = float(np.sqrt((errors[wrong, 0] / errors[wrong, 1]).max()))
            self.on_wrong(keys[wrong].tolist(), worst)
        return ~wrong


@dataclass(slots=True)
class Table:
    """Sketches of one step. `rows` and `samples` may still be being copied from a device."""

    keys: NDArray[np.int32]
    rows: Any
    """float64 (T, NUM_FIELDS): an array on the host, or a tensor on a device."""
    samples: Tensor | None = None
    sampled: NDArray[np.int64] | None = None
    """The number of sampled elements of each row; 0 = none."""
    sample_rows: NDArray[np.int64] | None = None
    """The row of `samples` that belongs to each key, if they are not in order; -1 = none."""
    stream: Any = None
    """The stream on which it was made, if it was made on a GPU."""
    check: Check | None = None
    """A check of whether the rows are correct."""
    transfer: tuple[HostTransfer, int] | None = None
    """The transfer of rows, samples and check, and the index of its first piece."""

    @property
    def num_bytes(self) -> int:
        return 8 * int(self.rows.shape[0]) * int(self.rows.shape[1]) + (
            4 * self.samples.numel() if self.samples is not None else 0
        )

    def resolve(self) -> tuple[NDArray[np.int32], Array, Array | None]:
        """Keys, rows and histograms. Waits for the device, so do not call it on the training thread."""
        pieces = self._arrived()
        rows = next(pieces)
        hist = None
        if self.samples is not None and self.sampled is not None:
            rows[:, HIST_N] = self.sampled
            samples = next(pieces)
            if self.sample_rows is not None:
                samples = np.where((self.sample_rows >= 0)[:, None], samples[self.sample_rows], 0.0)
            hist = histograms(samples, rows)
        if self.check is not None:
            good = self.check.good_rows(next(pieces), self.keys)
            return self.keys[good], rows[good], None if hist is None else hist[good]
        return self.keys, rows, hist

    def pieces(self) -> list[Tensor]:
        return [t for t in (self.rows, self.samples, self.check and self.check.errors) if isinstance(t, Tensor)]

    def _arrived(self) -> Iterator[Array]:
        if self.transfer is not None:
            transfer, first = self.transfer
            for piece, numbers in zip(self.pieces(), transfer.open()[first:], strict=False):
                yield numbers.reshape(piece.shape)
        else:
            if not isinstance(self.rows, Tensor):
                yield self.rows
            for piece in self.pieces():
                yield piece.cpu().numpy().astype(np.float64)


def resolve_all(tables: Sequence[Table]) -> tuple[NDArray[np.int32], Array, NDArray[np.int32], Array]:
    """Keys and rows of all tables, one row per key, and the histograms of the rows that have one, with their index."""
    if not tables:
        return np.empty(0, np.int32), empty_rows(0), np.empty(0, np.int32), empty_hist(0)
    parts = [table.resolve() for table in tables]
    keys = np.concatenate([keys for keys, _, _ in parts])
    rows = np.concatenate([rows for _, rows, _ in parts])
    hist = None
    if any(hist is not None for _, _, hist in parts):
        hist = np.concatenate([empty_hist(len(keys)) if hist is None else hist for keys, _, hist in parts])
    keys, rows, hist = _merge_repeated(keys, rows, hist)
    if hist is None:
        return keys, rows, np.empty(0, np.int32), empty_hist(0)
    index = np.flatnonzero(rows[:, HIST_N] > 0).astype(np.int32)
    return keys, rows, index, hist[index]


def _merge_repeated(
    keys: NDArray[np.int32], rows: Array, hist: Array | None
) -> tuple[NDArray[np.int32], Array, Array | None]:
    """A module called several times, or in several micro-batches, is one site."""
    if np.bincount(keys).max(initial=0) <= 1:
        return keys, rows, hist
    unique, counts = np.unique(keys, return_counts=True)
    order = np.argsort(keys, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp)
    merged = merge_groups(rows[order], starts)
    return unique, merged, None if hist is None else np.add.reduceat(hist[order], starts, axis=0)


def scale_rows(table: Table, factor: Any) -> None:
    """Turn it into the sketches of `factor * x`, factor > 0; the factor may be on the host or on a device."""
    rows, factor = table.rows, _beside(table.rows, factor)
    with np.errstate(over="ignore", invalid="ignore"):  # a scaler that has halved its scale to zero
        for column in (SUM, SUMABS, MIN, MAX):
            rows[:, column] *= factor
        rows[:, SUMSQ] *= factor * factor
    if table.samples is not None:
        table.samples *= factor if isinstance(factor, float) else factor.to(table.samples.dtype)


def set_raw(table: Table, factors: Mapping[int, Any]) -> None:
    """The sum of squares before clipping, from each gradient's factor; infinite for a factor of 0, from which it cannot
    be computed."""
    by_factor: dict[int, tuple[Any, list[int]]] = {}  # clipping by norm multiplies all gradients by one number
    for row, key in enumerate(table.keys.tolist()):
        if key in factors:
            by_factor.setdefault(id(factors[key]), (factors[key], []))[1].append(row)
    for factor, rows in by_factor.values():
        factor = _beside(table.rows, factor)
        # A list as an index would be copied to the device with a wait: all rows at once, or one by one.
        places: list[Any] = [slice(None)] if len(rows) == len(table.keys) else rows
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for place in places:
                table.rows[place, SUMSQ_RAW] = _divided(table.rows[place, SUMSQ], factor * factor)


def _divided(values: Any, by: Any) -> Any:
    if isinstance(by, Tensor):
        return torch.where(by > 0, values / by, torch.inf)
    return values / by if by > 0 else np.inf


def _beside(rows: Array | Tensor, factor: Any) -> Any:
    """The factor on the rows' device. On the CPU that is a number; on a device it stays a tensor, and nothing waits."""
    if isinstance(rows, np.ndarray):
        return float(factor)
    return factor.to(rows.device, rows.dtype, non_blocking=True) if isinstance(factor, Tensor) else factor


def add_zeros(rows: Any, num_zeros: int) -> None:
    """Count the zeros that a sparse layout does not store; they are elements like any other."""
    if num_zeros:
        rows[..., N] += num_zeros
        rows[..., ZERO] += num_zeros
        rows[..., MIN] = rows[..., MIN].clip(max=0.0)
        rows[..., MAX] = rows[..., MAX].clip(min=0.0)


def negate_rows(table: Table) -> None:
    """Turn it into the sketches of `-x`."""
    rows = table.rows
    rows[:, SUM] *= -1
    lowest = -rows[:, MAX]
    rows[:, MAX] = -rows[:, MIN]
    rows[:, MIN] = lowest


def send(tables: Sequence[Table]) -> None:
    """Start the copies to the host, one for each stream; nothing waits. Without CUDA, `resolve` copies."""
    far = [t for t in tables if isinstance(t.rows, Tensor) and t.rows.device.type == "cuda"]
    groups: dict[tuple[torch.device, int], list[Table]] = {}
    for table in far:
        groups.setdefault((table.rows.device, 0 if table.stream is None else table.stream.cuda_stream), []).append(
            table
        )
    for group in groups.values():
        made_on = group[0].stream
        if made_on is None or made_on == torch.cuda.current_stream(group[0].rows.device):
            _send(group)
        else:
            with torch.cuda.stream(made_on):
                _send(group)


def _send(tables: Sequence[Table]) -> None:
    pieces: list[Tensor] = []
    firsts = []
    for table in tables:
        firsts.append(len(pieces))
        pieces += table.pieces()
    transfer = HostTransfer(pieces)
    for table, first in zip(tables, firsts, strict=True):
        table.transfer = transfer, first
        # Only their shapes are needed from now on.
        table.rows = _shape_of(table.rows)
        table.samples = None if table.samples is None else _shape_of(table.samples)
        if table.check is not None:
            table.check.errors = _shape_of(table.check.errors)


def _shape_of(tensor: Tensor) -> Tensor:
    """A stand-in without memory, so that the device's can be reused."""
    return torch.empty(tensor.shape, device="meta")
