"""The data model of snapshots: names, element types and storage locations of whole tensors. No I/O.

A tensor is stored as bits: the bytes a framework had in memory, in a numpy type of the same width. `as_values` converts
the bits to values; numpy itself lacks bfloat16 and the 8-bit floats, so it uses ml_dtypes for them.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from sonde.errors import UnknownNameError, UsageError
from sonde.schema.packages import require

AnyArray = npt.NDArray[Any]

SNAPSHOT_FORMAT: Final = 2
ATTRIBUTE: Final = "sonde"
"""The key of a group's attributes under which sonde stores its facts about a snapshot."""

DTYPE_ATTRIBUTE: Final = "torch_dtype"
"""The key of an array's attributes that names its type: bfloat16 and 8-bit floats are stored as integers."""
GROUP_FILE: Final = "zarr.json"

TENSORS_FOLDER: Final = "tensors"
HIDDEN_FOLDER: Final = ".tensors"
"""Next to `tensors/`, which has only finished snapshots: partial snapshots (`tmp-*`), the state of the upload, and, in
runs of earlier versions, deleted snapshots that later ones are a difference from (`step-*`)."""
ARCHIVE_SUFFIX: Final = ".zarr.zip"

SNAPSHOT_KINDS: Final = ("param", "grad", "act", "optim", "probe", "batch")
"""The kinds of tensors in a run's snapshots."""


def parse_kinds(given: str | Iterable[str]) -> list[str]:
    """Kinds of a snapshot, as a list or separated by commas; ["all"] for all of them.

    >>> parse_kinds("param, grad"), parse_kinds(["param"]), parse_kinds("all")
    (['param', 'grad'], ['param'], ['all'])
    """
    wanted = [kind.strip() for kind in given.split(",") if kind.strip()] if isinstance(given, str) else list(given)
    if "all" in wanted:
        return ["all"]
    for kind in wanted:
        if kind not in SNAPSHOT_KINDS:
            raise UnknownNameError("snapshot kind", str(kind), (*SNAPSHOT_KINDS, "all"))
    if not wanted:
        raise UsageError(f"kinds is empty; a snapshot holds at least one of {', '.join(SNAPSHOT_KINDS)}.")
    return wanted


KINDS: Final = ("param", "grad", "update", "act", "actgrad", "optim", "probe", "batch", "custom")

STORAGE: Final[Mapping[str, str]] = {
    "float64": "float64", "float32": "float32", "float16": "float16", "bfloat16": "uint16", "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8", "float8_e5m2": "uint8", "float8_e5m2fnuz": "uint8", "float8_e8m0fnu": "uint8",
    "int64": "int64", "int32": "int32", "int16": "int16", "int8": "int8", "uint64": "uint64", "uint32": "uint32",
    "uint16": "uint16", "uint8": "uint8", "bool": "bool", "complex128": "complex128", "complex64": "complex64",
    "complex32": "uint32",
}  # fmt: skip
"""The numpy type that holds the bits of a torch type, by its name."""

_UNSAFE: Final = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]")
_MAX_NAME_BYTES: Final = 200
_STEP: Final = re.compile(r"step-(\d{9,})(?:\.zarr\.zip)?")
_ATTEMPT: Final = re.compile(r"attempt-(\d{4,9})")


class SnapshotKey(NamedTuple):
    """Identifies a snapshot: a run that returns to an earlier step may take one of the same step in several attempts.

    >>> str(SnapshotKey(0, 500)), str(SnapshotKey(1, 500))
    ('step 500', 'step 500 of attempt 1')
    """

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of attempt {self.attempt}" if self.attempt else f"step {self.step}"


@dataclass(frozen=True, slots=True)
class HostTensor:
    """The bits of one tensor in host memory; they may be strided, and belong to whoever created them."""

    bits: AnyArray
    """`storage_dtype(dtype)`, in the tensor's shape or flat."""
    dtype: str
    """The torch name: "bfloat16"."""
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bits.dtype != storage_dtype(self.dtype):
            raise UsageError(
                f"the bits of a {self.dtype} tensor are {storage_dtype(self.dtype)}; got {self.bits.dtype}. "
                "Create it with HostTensor.of(array)."
            )
        if self.bits.size != math.prod(self.shape):
            raise UsageError(f"a tensor of shape {list(self.shape)} has {math.prod(self.shape)} elements, "
                             f"its bits have {self.bits.size}.")  # fmt: skip

    @classmethod
    def of(cls, array: AnyArray) -> HostTensor:
        """A tensor from an array of values; accepts the types of ml_dtypes.

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
        """The bits as one contiguous array, copied only if they are strided."""
        return np.ascontiguousarray(self.bits).reshape(-1)

    def values(self) -> AnyArray:
        return as_values(self.flat().reshape(self.shape), self.dtype)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Whole tensors at one step, by name: `param/layers.3.mlp.weight`, `optim/0.weight.exp_avg`, `probe/encoder`."""

    step: int
    time: float
    reason: str
    tensors: Mapping[str, HostTensor]
    attempt: int = 0

    @property
    def key(self) -> SnapshotKey:
        return SnapshotKey(self.attempt, self.step)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Returned by a store when a snapshot is durable and visible."""

    step: int
    nbytes: int
    """Size of the tensors in memory."""
    stored_bytes: int
    """Size of the tensors in the store."""
    num_tensors: int
    sha256: str
    """Checksum of the group's document, which holds a checksum of every tensor."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts that only this store knows: a commit, for example."""


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy type that holds the bits of a type.

    >>> storage_dtype("bfloat16")
    dtype('uint16')
    """
    try:
        return np.dtype(STORAGE[dtype])
    except KeyError:
        raise UnknownNameError("tensor dtype", dtype, STORAGE) from None


def as_values(bits: AnyArray, dtype: str) -> AnyArray:
    """Bits as values: an array of that type, without a copy if numpy or ml_dtypes knows the type.

    >>> as_values(np.array([0x3F80], np.uint16), "bfloat16").astype(float)
    array([1.])
    """
    if bits.dtype != storage_dtype(dtype):
        raise UsageError(f"the bits of a {dtype} tensor are {storage_dtype(dtype)}; got {bits.dtype}.")
    if dtype == "complex32":  # neither numpy nor ml_dtypes has it; complex64 represents every value of it
        pairs = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
        return pairs.view(np.complex64).reshape(bits.shape)
    if STORAGE[dtype] == dtype:
        return bits
    ml_dtypes = require("ml_dtypes", "tensors", f"Reading {dtype} tensors")
    return bits.view(np.dtype(getattr(ml_dtypes, dtype)))


def kind_of(name: str) -> str:
    """The kind at the start of a tensor's name.

    >>> kind_of("optim/0.weight.exp_avg")
    'optim'
    """
    kind, slash, _ = name.partition("/")
    return kind if slash and kind in KINDS else "custom"


def group_name(step: int, rank: int = 0, attempt: int = 0) -> str:
    """The group of a snapshot in a repository. Every rank has its own groups: no two writers share an array.

    >>> group_name(500), group_name(500, rank=1), group_name(500, attempt=2)
    ('step-000000500', 'rank-0001/step-000000500', 'attempt-0002/step-000000500')
    """
    if step < 0:
        raise UsageError(f"the step of a snapshot must be 0 or more; got {step}.")
    parent = parent_name(rank, attempt)
    return f"{parent}/step-{step:09d}" if parent else f"step-{step:09d}"


def parent_name(rank: int = 0, attempt: int = 0) -> str:
    """The group, or the folder, that holds the snapshots of a rank and an attempt. The first attempt has none: its
    snapshots are where all of them were before there were attempts.

    >>> parent_name(), parent_name(1), parent_name(1, 2)
    ('', 'rank-0001', 'rank-0001/attempt-0002')
    """
    return "/".join([f"rank-{rank:04d}"] * (rank > 0) + [f"attempt-{attempt:04d}"] * (attempt > 0))


def older_group(group: str) -> str:
    """Where earlier versions put the group of a deleted snapshot in a repository, if others were a difference from
    it."""
    return f"deleted/{group}"


def archive_name(step: int) -> str:
    """The file of a snapshot, inside `tensors/` (or `tensors/rank-0001/`): a Zarr group in a ZIP archive.

    >>> archive_name(500)
    'step-000000500.zarr.zip'
    """
    return f"{group_name(step)}{ARCHIVE_SUFFIX}"


def step_of(name: str) -> int | None:
    """The step of a snapshot's file or group; None for another name.

    >>> step_of("step-000000500.zarr.zip"), step_of("step-000000500"), step_of("tmp")
    (500, 500, None)
    """
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def attempt_of(name: str) -> int | None:
    """The attempt of a folder or a group of snapshots; None for another name.

    >>> attempt_of("attempt-0002"), attempt_of("attempt-0000"), attempt_of("step-000000500")
    (2, None, None)
    """
    match = _ATTEMPT.fullmatch(name)
    number = int(match.group(1)) if match else 0
    return number if number and parent_name(attempt=number) == name else None


def array_paths(names: Iterable[str]) -> dict[str, str]:
    """The Zarr array of each tensor of a snapshot: its own name. A name that Zarr or a file system cannot store, or
    that differs from another only in case, is changed and ends in a hash.

    >>> array_paths(["param/layers.3.mlp.weight", "custom/.."])
    {'param/layers.3.mlp.weight': 'param/layers.3.mlp.weight', 'custom/..': 'custom/_-58c40f53'}
    """
    paths: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        path = name if _is_plain(name) and _folded(name) not in taken else _hashed(name)
        taken.add(_folded(path))
        paths[name] = path
    return paths


def _is_plain(name: str) -> bool:
    kind, slash, site = name.partition("/")
    is_node = not _UNSAFE.search(site) and site.strip(".") and not site.startswith("__") and site != "zarr.json"
    return bool(slash) and kind in KINDS and bool(is_node) and len(site.encode()) <= _MAX_NAME_BYTES


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", path).casefold()


def _hashed(name: str) -> str:
    kind = kind_of(name)
    site = _UNSAFE.sub("_", name.removeprefix(f"{kind}/")).strip("._") or "_"
    short = site.encode()[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return f"{kind}/{short}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def is_inside(path: str) -> bool:
    """Whether a path in a document stays in the snapshot's own folder."""
    return all(part.strip(".") and "\\" not in part and "\0" not in part for part in path.split("/"))


def tensors_folder(run: Path) -> Path:
    return run / TENSORS_FOLDER


def hidden_folder(run: Path) -> Path:
    return run / HIDDEN_FOLDER
