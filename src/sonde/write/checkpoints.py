"""Writes and deletes checkpoints atomically: written to a hidden folder, synced, renamed. Knows no tensor.

All system calls go through `os`, where a test can break them. `write_link` names the run that a checkpoint belongs to.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from sonde.schema.checkpoints import (
    HIDDEN,
    LINK_FILE,
    MANIFEST_FILE,
    Manifest,
    StoredFile,
    encode_manifest,
    folder_of_step,
    parse_folder,
)
from sonde.write.durable import make_folder, sync_folder, write_durably
from sonde.write.lock import RunLock

WRITING: Final = f"{HIDDEN}writing-"
DELETING: Final = f"{HIDDEN}deleting-"
LOCK_PATIENCE_S: Final = 60.0
"""Another process may be saving to the same folder; how long that takes depends on the size of its tensors."""
_BLOCK: Final = 1 << 20

FileWriter = Callable[[Path], None]
"""Writes one file at the given path; the caller syncs and hashes it."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time changes a folder of checkpoints. The holder of the lock may remove what a dead process
    left."""
    make_folder(folder)
    lock = RunLock(folder, patience_s=LOCK_PATIENCE_S)
    try:
        _sweep(folder)
        yield
    finally:
        lock.release()


def write_checkpoint(folder: Path, manifest: Manifest, files: Mapping[str, FileWriter]) -> tuple[Path, Manifest]:
    """Durable and visible when this returns; absent if it raises. Call it `locked`."""
    tmp = folder / f"{WRITING}{os.getpid()}-{secrets.token_hex(4)}"
    os.mkdir(tmp)  # noqa: PTH102
    try:
        stored = {name: _write(tmp / name, write) for name, write in files.items()}
        manifest = replace(manifest, files=stored)
        write_durably(tmp / MANIFEST_FILE, encode_manifest(manifest))
        path = folder / _free_name(folder, manifest.step)
        os.rename(tmp, path)  # noqa: PTH104
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    sync_folder(folder)
    _drop_older(folder, path)
    return path, manifest


def delete_checkpoint(path: Path) -> None:
    """Deleted by one rename; the bytes follow a moment later. Call it `locked`."""
    hidden = path.parent / f"{DELETING}{secrets.token_hex(4)}"
    os.rename(path, hidden)  # noqa: PTH104
    sync_folder(path.parent)
    shutil.rmtree(hidden, ignore_errors=True)  # the next holder of the lock removes the rest


def _write(path: Path, write: FileWriter) -> StoredFile:
    """The hash of the bytes read back from disk, so that a corrupted write is noticed on loading."""
    write(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(1) as pool:  # the disk syncs while the hash is computed
            synced = pool.submit(os.fsync, fd)
            stored = _hashed(fd)
            synced.result()
    finally:
        os.close(fd)
    return stored


def _hashed(fd: int) -> StoredFile:
    digest, num_bytes = hashlib.sha256(), 0
    while block := os.read(fd, _BLOCK):
        digest.update(block)
        num_bytes += len(block)
    return StoredFile(num_bytes, digest.hexdigest())


def _free_name(folder: Path, step: int) -> str:
    copies = [copy for name in _names(folder) for at, copy in [parse_folder(name) or (-1, 0)] if at == step]
    return folder_of_step(step, max(copies, default=0) + 1)


def _drop_older(folder: Path, path: Path) -> None:
    """Remove other copies of the same step: this one is on disk now."""
    step, newest = parse_folder(path.name) or (-1, 0)
    for name in _names(folder):
        at, copy = parse_folder(name) or (-1, 0)
        if at == step and copy < newest:
            delete_checkpoint(folder / name)


def _sweep(folder: Path) -> None:
    """A hidden folder, while we hold the lock, belongs to a process that died."""
    for name in _names(folder):
        if name.startswith((WRITING, DELETING)):
            shutil.rmtree(folder / name, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def write_link(folder: Path, run: Path, *, step: int | None = None) -> None:
    """The path is relative, so that both may be moved together. `step` is the one that comes after the checkpoint."""
    make_folder(folder)
    where = {"run": os.path.relpath(run.resolve(), folder.resolve()), "absolute": str(run.resolve())}
    content = {**where, **({} if step is None else {"step": step})}
    write_durably(folder / LINK_FILE, json.dumps(content).encode())
