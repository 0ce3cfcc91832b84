"""Opening of weights files by extension, as lazy tensors. Nothing in a file is executed, and torch is not imported."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sonde.errors import CorruptError, SondeError, UsageError
from sonde.read.tensors.files.hdf5 import open_hdf5
from sonde.read.tensors.files.numpy import open_npz
from sonde.read.tensors.files.safetensors import open_safetensors
from sonde.read.tensors.files.torch import open_torch
from sonde.read.tensors.lazy import LazyTensors
from sonde.schema.snapshots.tensors import AnyArray

OPENERS: Final[dict[str, Callable[[Path], LazyTensors]]] = {
    ".safetensors": open_safetensors, ".pt": open_torch, ".pth": open_torch, ".bin": open_torch, ".ckpt": open_torch,
    ".npz": open_npz, ".h5": open_hdf5, ".hdf5": open_hdf5, ".keras": open_hdf5,
}  # fmt: skip
_FAILURES: Final = (
    *(ArithmeticError, EOFError, LookupError, MemoryError, NotImplementedError, OSError, RuntimeError, TypeError),
    *(ValueError, struct.error, zipfile.BadZipFile, zlib.error),
)
INDEXES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE: Final = ("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "model.npz")
"""File names in a folder of weights, in order of preference."""


def is_tensor_file(path: str | os.PathLike[str]) -> bool:
    """Whether a path names weights rather than a run: a file with a known extension, or a folder that contains one."""
    found = Path(path)
    if found.is_dir():
        return _inside(found) is not None
    return found.suffix in OPENERS or found.name in INDEXES


def open_tensors(path: str | os.PathLike[str]) -> LazyTensors:
    """The tensors of a file or folder: safetensors, torch.save (without executing its pickle), .npz, HDF5, Keras.

    sonde.read.tensors.files.formats.open_tensors("model.safetensors")["layers.0.weight"]
    """
    found = Path(path)
    if found.is_dir():
        inside = _inside(found)
        if inside is None:
            raise UsageError(f"{found} is a folder without any of {', '.join((*INDEXES, *WHOLE))}. Name the file.")
        found = inside
    if found.name in INDEXES:
        return _sharded(found)
    if found.suffix not in OPENERS:
        raise UsageError(f"cannot read weights from {found}. Give a {', '.join(OPENERS)} file, or a folder of them.")
    if not found.exists():
        raise FileNotFoundError(2, "No such file", str(found))
    if not found.is_file():
        raise UsageError(f"{found} is not a regular file, so it is not read.")
    return _open(found)


def _open(path: Path) -> LazyTensors:
    """Turn the various exceptions of zip, pickle and HDF5 readers into CorruptError."""
    with _damage(path):
        found = OPENERS[path.suffix](path)

    def read(name: str) -> AnyArray:
        with _damage(path):
            return found[name]

    return LazyTensors(found.label, found.specs, read)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (SondeError, FileNotFoundError, PermissionError):
        raise
    except _FAILURES as error:
        raise CorruptError(f"{path} is damaged, or does not match its extension: {error!r}.") from error


def _inside(folder: Path) -> Path | None:
    return next((folder / name for name in (*INDEXES, *WHOLE) if (folder / name).is_file()), None)


def _sharded(index: Path) -> LazyTensors:
    """Weights spread over several files, as Hugging Face writes them."""
    try:
        shard_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError(f"{index} is not an index of weights ({error!r}).") from error
    # A name with a path separator could lead out of the folder.
    strange = [shard for shard in shard_of.values() if not isinstance(shard, str) or Path(shard).name != shard]
    if strange:
        raise CorruptError(f"{index} names {strange[0]!r}, which is not a file next to it.")
    shards = {shard: _open(index.parent / shard) for shard in sorted(set(shard_of.values()))}
    missing = [name for name, shard in shard_of.items() if name not in shards[shard]]
    if missing:
        raise CorruptError(f'{index}: the tensor "{missing[0]}" is not in {shard_of[missing[0]]}.')

    def read(name: str) -> AnyArray:
        return shards[shard_of[name]][name]

    specs = {name: shards[shard].specs[name] for name, shard in shard_of.items()}
    return LazyTensors(str(index.parent), specs, read)
