"""Snapshots as a Zarr v3 hierarchy on the local disk. One writer, held to it by a lock; any number of readers.

A snapshot is written whole into a hidden folder, every file and folder of it is synced, and one rename makes it
visible. What a killed writer left in the hidden folder is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from sonde.errors import RunError, UsageError
from sonde.record.codecs import bit_round, check_mantissa_bits, codec_for, require_codecs, rounds
from sonde.record.deltas import Deltas
from sonde.record.durable import sync_folder, write_all
from sonde.record.lock import RunLock
from sonde.record.packing import SHARD_BYTES, ArrayPlan, plan_arrays
from sonde.record.shards import array_document, write_shards
from sonde.schema.lake import SnapshotDocument, SnapshotReader, difference
from sonde.schema.shards import checksum_of
from sonde.schema.tensors import (
    AnyArray,
    HostTensor,
    Receipt,
    Snapshot,
    TensorEntry,
    group_name,
    hidden_folder,
    step_of,
    tensors_folder,
)

GROUP_FILE: Final = "zarr.json"
_ROOT: Final = b'{"zarr_format": 3, "node_type": "group", "attributes": {"sonde": {"format": 1}}}'
_TMP: Final = "tmp-"
_PIECE: Final = 1 << 22


class LocalLake:
    """The store "zarr", and the spool of those that live elsewhere."""

    def __init__(
        self,
        run: Path,
        *,
        rank: int = 0,
        compression: str = "auto",
        keep_mantissa_bits: int | None = None,
        delta_mib: float = 512.0,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        codec_for("param", compression)
        check_mantissa_bits(keep_mantissa_bits)
        if not delta_mib >= 0:
            raise UsageError(f"delta_mib is memory in MiB, or 0 for no differences; got {delta_mib!r}.")
        require_codecs()
        self._where = run.name
        self._rank, self._compression, self._keep_bits = rank, compression, keep_mantissa_bits
        self._shard_bytes = shard_bytes
        self._folder = (tensors_folder(run) / group_name(0, rank)).parent
        self._hidden = (hidden_folder(run) / group_name(0, rank)).parent
        self._deltas = Deltas(int(delta_mib * (1 << 20)), compression)
        self._lock = self._prepare(tensors_folder(run))

    def write(self, snapshot: Snapshot) -> Receipt:
        step = snapshot.step
        if self.path(step).exists():
            raise UsageError(f"step {step} is in the store already. Delete it first.")
        tmp = self._hidden / f"{_TMP}{step}-{secrets.token_hex(4)}"
        try:
            receipt = self._write_group(tmp, snapshot)
            _publish(tmp, self._folder / group_name(step))
        except BaseException as error:
            self._deltas.forget()
            shutil.rmtree(tmp, ignore_errors=True)
            if isinstance(error, OSError):
                raise RunError(_explain(step, error)) from error
            raise
        return receipt

    def steps(self) -> list[int]:
        return _steps_in(self._folder)

    def read(self, step: int, names: Iterable[str] | None = None) -> Snapshot:
        if step not in self.steps():
            raise RunError(f"no snapshot of step {step}. There are: {self.steps()}.")
        reader = self.reader(step)
        document = reader.document
        tensors = {}
        for name in document.tensors if names is None else names:
            entry = reader.entry(name)
            tensors[name] = HostTensor(reader.bits(name), entry.dtype, entry.shape)
        return Snapshot(document.step, document.time, document.reason, tensors)

    def delete(self, step: int) -> None:
        """One that later snapshots are a difference to is hidden, and goes when the last of them goes."""
        if step not in self.steps():
            raise RunError(f"no snapshot of step {step}. There are: {self.steps()}.")
        if step == self._deltas.step:
            self._deltas.forget()
        needed = self._needed()
        hidden = self._hidden / group_name(step)
        target = hidden if step in needed else self._hidden / f"{_TMP}{step}-{secrets.token_hex(4)}"
        os.rename(self._folder / group_name(step), target)  # noqa: PTH104  system calls go through `os`
        sync_folder(self._folder)
        sync_folder(self._hidden)
        if target is not hidden:
            shutil.rmtree(target)
        self._collect()

    @property
    def base(self) -> int:
        """The step that the next snapshot may be a difference to; below zero: none."""
        return self._deltas.step

    def close(self) -> None:
        self._deltas.forget()
        self._lock.release()

    def forget_in_child(self) -> None:
        """In a forked child: the lock is the parent's. A child that outlives it must not hold on to it."""
        self._lock.forget()

    def path(self, step: int) -> Path:
        """The folder of a snapshot, visible or not."""
        visible = self._folder / group_name(step)
        return visible if visible.exists() else self._hidden / group_name(step)

    def reader(self, step: int) -> SnapshotReader:
        folder = self.path(step)
        where = f"{self._where}/{folder.name}"
        try:
            document = SnapshotDocument.from_bytes((folder / GROUP_FILE).read_bytes(), where)
        except OSError as error:
            raise RunError(f"cannot read {folder / GROUP_FILE}: {error.strerror}.") from error
        return SnapshotReader(
            document, lambda key, offset, size: _read_at(folder / key, offset, size), self.reader, where
        )

    # -------------------------------------------------------------------------------------------------------- writing

    def _prepare(self, root: Path) -> RunLock:
        self._hidden.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self._hidden, patience_s=0.0)  # no reader takes this one
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for folder in {root, self._folder}:
                if not (folder / GROUP_FILE).exists():
                    # Other ranks may do the same at this moment: a name of its own, and any of them may win.
                    tmp = self._hidden / f"root-{secrets.token_hex(4)}"
                    _write_synced(tmp, _ROOT)
                    os.replace(tmp, folder / GROUP_FILE)  # noqa: PTH105
            for folder in {root.parent, root, self._folder, self._hidden, self._hidden.parent}:
                sync_folder(folder)
            for left in self._hidden.glob(f"{_TMP}*"):
                shutil.rmtree(left)
            for left in self._hidden.glob("root-*"):
                left.unlink()
        except BaseException as error:
            lock.release()
            if isinstance(error, OSError):
                raise RunError(f"cannot keep snapshots in {self._folder}: {error.strerror}.") from error
            raise
        return lock

    def _write_group(self, tmp: Path, snapshot: Snapshot) -> Receipt:
        tensors = dict(snapshot.tensors)
        chosen = self._deltas.choose(tensors)
        plans = plan_arrays(tensors, chosen.__contains__, compression=self._compression, shard_bytes=self._shard_bytes)
        tmp.mkdir()
        entries: dict[str, TensorEntry] = {}
        stored = sum(self._write_array(tmp / plan.name, plan, tensors, chosen, entries) for plan in plans)
        document = SnapshotDocument(
            step=snapshot.step,
            time=snapshot.time,
            reason=snapshot.reason,
            rank=self._rank,
            tensors={name: entries[name] for name in tensors},
            arrays={plan.name: plan.layout for plan in plans},
            details={"compression": self._compression},
        ).to_bytes()
        _write_synced(tmp / GROUP_FILE, document)
        sync_folder(tmp)
        self._deltas.written(snapshot.step, tensors, chosen)
        return Receipt(
            step=snapshot.step,
            nbytes=snapshot.nbytes,
            stored_bytes=stored + len(document),
            num_tensors=len(tensors),
            sha256=hashlib.sha256(document).hexdigest(),
            details={"num_deltas": len(chosen)},
        )

    def _write_array(
        self,
        folder: Path,
        plan: ArrayPlan,
        tensors: dict[str, HostTensor],
        chosen: set[str],
        entries: dict[str, TensorEntry],
    ) -> int:
        folder.mkdir()
        document = array_document(plan.layout, plan.codec)
        _write_synced(folder / GROUP_FILE, document)
        runs = self._runs(plan, tensors, chosen, entries)
        files, num_bytes = write_shards(folder, plan.layout, plan.codec, runs)
        for _ in runs:  # what follows the last element: tensors that have none
            pass
        for made in {parent for file in files for parent in file.parents if parent.is_relative_to(folder)} | {folder}:
            sync_folder(made)
        return num_bytes + len(document)

    def _runs(
        self, plan: ArrayPlan, tensors: dict[str, HostTensor], chosen: set[str], entries: dict[str, TensorEntry]
    ) -> Iterator[AnyArray]:
        """The bits of each tensor as they will be stored; its entry is made on the way, in the same pass."""
        offset = 0
        for name in plan.tensors:
            tensor = tensors[name]
            bits = tensor.flat()
            is_rounded = rounds(tensor.dtype, self._keep_bits)
            if is_rounded and self._keep_bits is not None:
                bits = bit_round(bits, tensor.dtype, self._keep_bits)
            entries[name] = TensorEntry(
                array=plan.name,
                offset=offset if plan.is_packed else None,
                shape=tensor.shape,
                dtype=tensor.dtype,
                crc32c=checksum_of(bits),
                delta_of=self._deltas.step if name in chosen else None,
                keep_mantissa_bits=self._keep_bits if is_rounded else None,
            )
            offset += bits.size
            yield from self._stored(name, bits) if name in chosen else (bits,)
            self._deltas.keep(name, tensor, bits)

    def _stored(self, name: str, bits: AnyArray) -> Iterator[AnyArray]:
        """The difference, in pieces: making it takes a few times its size in memory."""
        before = self._deltas.before(name)
        for start in range(0, bits.size, _PIECE):
            yield difference(bits[start : start + _PIECE], before[start : start + _PIECE])

    # ------------------------------------------------------------------------------------------------------- deleting

    def _needed(self) -> set[int]:
        """The steps that others are differences to."""
        steps = {*self.steps(), *_steps_in(self._hidden)}
        return {base for step in steps for base in self.reader(step).document.bases}

    def _collect(self) -> None:
        """Remove what was hidden and is needed no more; that may free another."""
        while unneeded := set(_steps_in(self._hidden)) - self._needed():
            for step in unneeded:
                shutil.rmtree(self._hidden / group_name(step))


def _steps_in(folder: Path) -> list[int]:
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(step for step in map(step_of, names) if step is not None)


def _read_at(path: Path, offset: int, size: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if offset < 0:
            offset = max(os.fstat(fd).st_size + offset, 0)
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def _write_synced(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(tmp: Path, final: Path) -> None:
    os.rename(tmp, final)  # noqa: PTH104  system calls go through `os`, where a test can break them
    try:
        sync_folder(final.parent)
    except BaseException:
        # It may or may not survive a power loss, and was not acknowledged: it must not be seen either.
        with contextlib.suppress(OSError):
            os.rename(final, tmp)  # noqa: PTH104
        raise


def _explain(step: int, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "The disk is full: free some space, or take fewer snapshots."
    else:
        remedy = "Nothing of it was kept; earlier snapshots are as they were."
    return f"cannot keep the snapshot of step {step}: {error.strerror or error}. {remedy}"
