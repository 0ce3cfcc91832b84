"""What a snapshot of whole tensors is: its names, its element types, its entries and where it lies. No I/O.

A tensor is kept as bits: the bytes a framework had in memory, in a numpy type of the same width. `as_values` gives the
bits their meaning; bfloat16 and the 8-bit floats have none in numpy itself, so it asks ml_dtypes for them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sonde.errors import MissingPackageError, UnknownNameError, UsageError

AnyArray = npt.NDArray[Any]

SNAPSHOT_FORMAT: Final = 1
ATTRIBUTE: Final = "sonde"
"""The key of a group's attributes under which sonde keeps what it knows of a snapshot."""

TENSORS_FOLDER: Final = "tensors"
HIDDEN_FOLDER: Final = ".tensors"
"""Beside `tensors/`, so that every Zarr reader sees finished, wanted snapshots only: halves of snapshots (`tmp-*`),
and deleted ones that later snapshots are still a difference to (`step-*`)."""

SNAPSHOT_KINDS: Final = ("param", "grad", "act", "optim", "probe", "batch")
"""What a run's snapshots may hold."""
KINDS: Final = ("param", "grad", "update", "act", "actgrad", "optim", "probe", "batch", "custom")

STORAGE: Final[Mapping[str, str]] = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint64": "uint64",
    "uint32": "uint32",
    "uint16": "uint16",
    "uint8": "uint8",
    "bool": "bool",
    "complex128": "complex128",
    "complex64": "complex64",
    "complex32": "uint32",
}
"""The numpy type whose bits hold a type, by its name in torch."""

DELTA_SUFFIX: Final = ".delta"
"""An array of differences says so in its name: read by itself it means nothing."""

_UNSAFE: Final = re.compile(r"[^\w.+=-]")
_MAX_NAME_BYTES: Final = 120
_STEP: Final = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True, slots=True)
class HostTensor:
    """The bits of one tensor in host memory; they may be strided, and belong to whoever made them."""

    bits: AnyArray
    """`storage_dtype(dtype)`, of the tensor's shape or flat."""
    dtype: str
    """As torch names it: "bfloat16"."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bits.dtype != storage_dtype(self.dtype):
            raise UsageError(
                f"the bits of a {self.dtype} tensor are {storage_dtype(self.dtype)}; got {self.bits.dtype}. "
                "Make it with HostTensor.of(array)."
            )
        if self.bits.size != math.prod(self.shape):
            raise UsageError(f"a tensor of shape {list(self.shape)} has {math.prod(self.shape)} elements, "
                             f"its bits have {self.bits.size}.")  # fmt: skip

    @classmethod
    def of(cls, array: AnyArray) -> HostTensor:
        """A tensor from an array of values; ml_dtypes' types are understood.

        >>> HostTensor.of(np.zeros((2, 3), np.float32)).nbytes
        24
        """
        name = array.dtype.name
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return cls(array.view(storage_dtype(name)), name, tuple(array.shape))

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def flat(self) -> AnyArray:
        """The bits as one contiguous run, copied only where they are strided."""
        return np.ascontiguousarray(self.bits).reshape(-1)

    def values(self) -> AnyArray:
        """The tensor as an array of its own type."""
        return as_values(self.flat().reshape(self.shape), self.dtype)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Whole tensors at one step, by name: `param/layers.3.mlp.weight`, `optim/0.weight.exp_avg`, `probe/encoder`."""

    step: int
    time: float
    reason: str
    tensors: Mapping[str, HostTensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor of a snapshot lies, and what it should sum up to."""

    array: str
    """The Zarr array in the snapshot's group."""
    offset: int | None
    """The first element in a packed array; none: the array is the tensor."""
    shape: tuple[int, ...]
    dtype: str
    crc32c: int
    """Of the tensor's raw little-endian bytes, differences undone."""
    delta_of: int | None = None
    """The step this one is a difference to."""
    keep_mantissa_bits: int | None = None
    """How many bits of the mantissa were kept, where rounding was asked for."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * storage_dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        optional = {"delta_of": self.delta_of, "keep_mantissa_bits": self.keep_mantissa_bits}
        return {
            "array": self.array,
            "offset": self.offset,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "crc32c": self.crc32c,
            **{name: value for name, value in optional.items() if value is not None},
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TensorEntry:
        """Raises KeyError, TypeError or ValueError on what no writer of ours wrote."""
        offset, delta_of, kept = content["offset"], content.get("delta_of"), content.get("keep_mantissa_bits")
        shape = tuple(int(length) for length in content["shape"])
        if min(shape, default=0) < 0 or content["dtype"] not in STORAGE:
            raise ValueError(f"no tensor is {content['dtype']} {list(shape)}")
        return cls(
            array=str(content["array"]),
            offset=None if offset is None else int(offset),
            shape=shape,
            dtype=str(content["dtype"]),
            crc32c=int(content["crc32c"]),
            delta_of=None if delta_of is None else int(delta_of),
            keep_mantissa_bits=None if kept is None else int(kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a store says when a snapshot is durable and visible."""

    step: int
    nbytes: int
    """Of the tensors as they were in memory."""
    stored_bytes: int
    """What they take in the store."""
    num_tensors: int
    sha256: str
    """Of the group's document, which holds a checksum of every tensor."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only this store knows: a commit, for example."""


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type that holds a type's bits.

    >>> storage_dtype("bfloat16")
    dtype('uint16')
    """
    try:
        return np.dtype(STORAGE[dtype])
    except KeyError:
        raise UnknownNameError("type of tensor", dtype, STORAGE) from None


def as_values(bits: AnyArray, dtype: str) -> AnyArray:
    """Bits with their meaning: an array of that type, without a copy where numpy or ml_dtypes knows the type.

    >>> as_values(np.array([0x3F80], np.uint16), "bfloat16").astype(float)
    array([1.])
    """
    if bits.dtype != storage_dtype(dtype):
        raise UsageError(f"the bits of a {dtype} tensor are {storage_dtype(dtype)}; got {bits.dtype}.")
    if dtype == "complex32":  # neither numpy nor ml_dtypes has it; complex64 holds every value of it
        pairs = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
        return pairs.view(np.complex64).reshape(bits.shape)
    if STORAGE[dtype] == dtype:
        return bits
    try:
        import ml_dtypes
    except ImportError:
        raise MissingPackageError("ml_dtypes", "tensors", f"Reading {dtype} tensors") from None
    return bits.view(np.dtype(getattr(ml_dtypes, dtype)))


def kind_of(name: str) -> str:
    """The kind a tensor's name begins with.

    >>> kind_of("optim/0.weight.exp_avg")
    'optim'
    """
    kind, slash, _ = name.partition("/")
    return kind if slash and kind in KINDS else "custom"


def group_name(step: int, rank: int = 0) -> str:
    """The group of a snapshot, inside `tensors/`. Every rank has groups of its own: no two writers share an array.

    >>> group_name(500), group_name(500, rank=1)
    ('step-000000500', 'rank-0001/step-000000500')
    """
    if step < 0:
        raise UsageError(f"a snapshot is of a step from 0 on; got {step}.")
    return f"rank-{rank:04d}/step-{step:09d}" if rank else f"step-{step:09d}"


def step_of(group: str) -> int | None:
    """The step of a snapshot's group; none for another name.

    >>> step_of("step-000000500"), step_of("tmp")
    (500, None)
    """
    match = _STEP.fullmatch(group)
    return int(match.group(1)) if match else None


def packed_array_name(kind: str, dtype: str, *, is_delta: bool) -> str:
    """The array that holds the small tensors of one kind and type.

    >>> packed_array_name("param", "bfloat16", is_delta=False)
    'param.bfloat16'
    """
    return f"{kind}.{dtype}{DELTA_SUFFIX if is_delta else ''}"


def own_array_name(name: str, *, is_delta: bool) -> str:
    """The array of one large tensor. A name that had to be changed ends in a hash, so that no two share an array.

    >>> own_array_name("param/layers.3.mlp.weight", is_delta=False)
    'param-layers.3.mlp.weight'
    """
    plain = name.replace("/", "-", 1)
    safe = _UNSAFE.sub("_", plain).lstrip("._-").encode()[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    if safe != plain or "/" not in name:
        safe = f"{safe}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return f"{safe}{DELTA_SUFFIX if is_delta else ''}"


def is_array_name(name: str) -> bool:
    """Whether a name in a document is one that no folder but the snapshot's own can be reached with."""
    return bool(name) and not _UNSAFE.search(name) and not name.startswith(".")


def tensors_folder(run: Path) -> Path:
    return run / TENSORS_FOLDER


def hidden_folder(run: Path) -> Path:
    return run / HIDDEN_FOLDER
