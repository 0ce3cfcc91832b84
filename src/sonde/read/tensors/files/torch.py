"""Files of torch.save as lazy tensors, without torch and without executing their contents.

A pickle is a program. This reader only knows how tensors are constructed: every other name becomes an inert
placeholder, which is never imported or called.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sonde.errors import CorruptError, UsageError
from sonde.read.tensors.lazy import LazyTensors, TensorSpec
from sonde.schema.snapshots.tensors import STORAGE, AnyArray, as_values, storage_dtype

MAX_PICKLE: Final = 256 << 20
CONVERT: Final = (
    "If you trust it, convert it:  safetensors.torch.save_file(torch.load(file, weights_only=True), 'out.safetensors')"
)
WEIGHTS: Final = ("state_dict", "model_state_dict", "model", "module", "weights")
"""Keys under which training scripts store the weights when they save more than those."""
_STORAGES: Final = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64", "UntypedStorage": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: str


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class _Placeholder:
    """A placeholder for anything that is not a tensor: accepts every argument and does nothing."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __call__(self, *arguments: Any, **keywords: Any) -> _Placeholder:
        return self

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...


class _Dict(OrderedDict[Any, Any]):
    """An OrderedDict that accepts and drops torch's `_metadata` attribute."""

    def __setstate__(self, state: Any) -> None: ...


def _rebuild_v2(storage: Any, offset: int, shape: Any, strides: Any, *_rest: Any) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)), storage.dtype)


def _rebuild_v3(
    storage: Any, offset: int, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: str, *_rest: Any
) -> _Tensor:
    return _Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, strides)), dtype)


def _first(value: Any, *_rest: Any) -> Any:
    return value


_KNOWN: Final[dict[tuple[str, str], Any]] = {
    ("collections", "OrderedDict"): _Dict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch", "Size"): tuple,
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in ("torch", "torch.storage"):
            if name in _STORAGES:
                return _STORAGES[name]
            if name in STORAGE:  # torch.bfloat16 and the like
                return name
        return _Placeholder

    def persistent_load(self, reference: Any) -> _Storage:
        kind, dtype, key, *_ = reference
        if kind != "storage" or not isinstance(dtype, str) or not isinstance(key, str):
            raise pickle.UnpicklingError(f"unknown storage {reference!r}")
        return _Storage(key, dtype)


def open_torch(path: Path) -> LazyTensors:
    """The tensors of a torch.save file; for a full training state, the weights (`state_dict`, `model`, …)."""
    if not zipfile.is_zipfile(path):
        raise UsageError(f"{path} is not in the zip format that torch.save has used since torch 1.6. {CONVERT}")
    with zipfile.ZipFile(path) as archive:
        folder, document = _load(path, archive)
        tensors = dict(_walk(_weights(document), ""))
        places = {
            info.filename.removeprefix(f"{folder}/data/"): (_data_start(path, info), info)
            for info in archive.infolist()
            if info.filename.startswith(f"{folder}/data/")
        }
    if not tensors:
        raise UsageError(f"{path} has no tensor that can be read without executing its pickle. {CONVERT}")
    for name, tensor in tensors.items():
        _check(path, name, tensor, places)

    def read(name: str) -> AnyArray:
        tensor = tensors[name]
        storage = _storage(path, *places[tensor.storage.key], tensor.dtype)
        strides = [stride * storage.itemsize for stride in tensor.strides]
        view = np.lib.stride_tricks.as_strided(storage[tensor.offset :], tensor.shape, strides, writeable=False)
        return as_values(np.ascontiguousarray(view).reshape(tensor.shape), tensor.dtype)

    specs = {name: TensorSpec(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    return LazyTensors(str(path), specs, read)


def _load(path: Path, archive: zipfile.ZipFile) -> tuple[str, Any]:
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE:
        raise UsageError(f"{path} is a zip file, but was not written by torch.save. {CONVERT}")
    folder = pickles[0].filename.removesuffix("/data.pkl")
    if f"{folder}/byteorder" in archive.namelist() and archive.read(f"{folder}/byteorder") != b"little":
        raise UsageError(f"{path} was written on a big-endian machine. {CONVERT}")
    try:
        with archive.open(pickles[0]) as file:
            return folder, _TensorUnpickler(file).load()
    except Exception as error:  # a damaged pickle can fail in any way
        raise CorruptError(f"{path}: cannot read its pickle ({error!r}). {CONVERT}") from error


def _weights(document: Any) -> Any:
    """The weights inside a training state, or the document itself if it contains only weights."""
    if isinstance(document, Mapping) and not any(isinstance(value, _Tensor) for value in document.values()):
        for key in WEIGHTS:
            if isinstance(document.get(key), Mapping):
                return document[key]
    return document


def _walk(value: Any, name: str) -> Iterator[tuple[str, _Tensor]]:
    if isinstance(value, _Tensor):
        yield name or "tensor", value
        return
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))
    else:
        return
    for key, member in inner:
        yield from _walk(member, f"{name}.{key}" if name else str(key))


def _data_start(path: Path, info: zipfile.ZipInfo) -> int | None:
    """The offset of a member's bytes in the file; None if they are compressed."""
    if info.compress_type != zipfile.ZIP_STORED:
        return None
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)
        lengths = file.read(4)
    return info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _storage(path: Path, start: int | None, info: zipfile.ZipInfo, dtype: str) -> AnyArray:
    kind = storage_dtype(dtype)
    if start is not None and info.file_size:
        return np.asarray(np.memmap(path, kind, "r", start, (info.file_size // kind.itemsize,)))
    with zipfile.ZipFile(path) as archive:
        return np.frombuffer(archive.read(info), kind)


def _check(path: Path, name: str, tensor: _Tensor, places: Mapping[str, tuple[int | None, zipfile.ZipInfo]]) -> None:
    """Check that a view stays inside its storage: its offsets come from the file."""
    if tensor.storage.key not in places or tensor.dtype not in STORAGE:
        raise CorruptError(f'{path}: the data of "{name}" ({tensor.dtype or "no dtype"}) is not in the file.')
    length = places[tensor.storage.key][1].file_size // storage_dtype(tensor.dtype).itemsize
    lengths_are_fine = len(tensor.shape) == len(tensor.strides) and min((*tensor.shape, *tensor.strides, 0)) >= 0
    is_empty = 0 in tensor.shape
    last = tensor.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.strides, strict=False))
    if not lengths_are_fine or tensor.offset < 0 or (not is_empty and last >= length):
        raise CorruptError(f'{path}: the tensor "{name}" reaches beyond its data.')
