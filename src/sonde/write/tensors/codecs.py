"""The compression of each kind of tensor, and optional rounding. Knows no file.

Weights and optimizer state are worth the time that zstd takes. Gradients and activations are noise in all but their
exponents: the fastest codec is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from sonde.errors import MissingPackageError, UnknownNameError, UsageError
from sonde.schema.snapshots.tensors import AnyArray

Shuffle = Literal["noshuffle", "shuffle", "bitshuffle"]
_SHUFFLES: Final[dict[Shuffle, int]] = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_LEVELS: Final = {"zstd": 1, "lz4": 5}

COMPRESSIONS: Final = ("auto", "none", "zstd", "lz4")
_MANTISSA: Final = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


@dataclass(frozen=True, slots=True)
class Codec:
    """One of blosc's codecs, or none at all."""

    name: Literal["none", "zstd", "lz4"]
    shuffle: Shuffle = "shuffle"

    @property
    def is_compressed(self) -> bool:
        return self.name != "none"

    def encode(self, run: AnyArray) -> bytes:
        if not self.is_compressed:
            return run.tobytes()
        from numcodecs import blosc

        shuffle = self._shuffle(run.dtype.itemsize)
        data: bytes = blosc.compress(run, self.name.encode(), _LEVELS[self.name], _SHUFFLES[shuffle], 0)
        return data

    def to_json(self, itemsize: int) -> list[dict[str, Any]]:
        """The codec's name in Zarr v3."""
        if not self.is_compressed:
            return []
        configuration = {
            "cname": self.name,
            "clevel": _LEVELS[self.name],
            "shuffle": self._shuffle(itemsize),
            "typesize": itemsize,
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": configuration}]

    def _shuffle(self, itemsize: int) -> Shuffle:
        return "noshuffle" if itemsize == 1 and self.shuffle == "shuffle" else self.shuffle


NONE: Final = Codec("none")
_ZSTD: Final = Codec("zstd", "shuffle")
_LZ4: Final = Codec("lz4", "bitshuffle")
_BY_KIND: Final[dict[str, Codec]] = {
    "param": _ZSTD, "optim": _ZSTD, "update": _ZSTD, "grad": _LZ4, "act": _LZ4, "actgrad": _LZ4, "probe": _LZ4,
    "batch": _ZSTD, "custom": _ZSTD,
}  # fmt: skip


def codec_for(kind: str, compression: str) -> Codec:
    """The codec for a kind of tensor under a setting.

    >>> codec_for("grad", "auto").name
    'lz4'
    """
    if compression not in COMPRESSIONS:
        raise UnknownNameError("compression", compression, COMPRESSIONS)
    if compression == "auto":
        return _BY_KIND.get(kind, _ZSTD)
    return {"none": NONE, "zstd": _ZSTD, "lz4": _LZ4}[compression]


def require_codecs() -> None:
    """Raise now, not at the first snapshot, if a package is missing."""
    try:
        import google_crc32c  # noqa: F401
        from numcodecs import blosc  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(error.name or "numcodecs", "tensors", "Recording whole tensors") from None


def check_mantissa_bits(keep: int | None) -> None:
    if keep is not None and not 0 <= keep <= max(_MANTISSA.values()):
        raise UsageError(f"keep_mantissa_bits must be from 0 to {max(_MANTISSA.values())}, or None; got {keep!r}.")


def rounds(dtype: str, keep: int | None) -> bool:
    """Whether this rounding changes a tensor of this type."""
    return keep is not None and keep < _MANTISSA.get(dtype, 0)


def bit_round(bits: AnyArray, dtype: str, keep: int) -> AnyArray:
    """The nearest numbers (ties to even) with that many bits of mantissa; NaN and infinity are unchanged.

    >>> bit_round(np.array([1.2345678], np.float32), "float32", 4)
    array([1.25], dtype=float32)
    """
    unsigned = np.dtype(f"u{bits.dtype.itemsize}").type
    dropped = _MANTISSA[dtype] - keep
    one = unsigned(1)
    whole = bits.view(unsigned)
    half = (one << unsigned(dropped - 1)) - one
    rounded = whole + half + ((whole >> unsigned(dropped)) & one)
    rounded &= ~((one << unsigned(dropped)) - one)
    exponent = unsigned(((1 << (8 * bits.dtype.itemsize - 1)) - 1) >> _MANTISSA[dtype] << _MANTISSA[dtype])
    # Rounding up the largest finite number would make it infinite: it is truncated instead, like NaN and Inf.
    is_special = (rounded & exponent) == exponent
    cut = np.where((whole & exponent) == exponent, whole, whole & ~((one << unsigned(dropped)) - one))
    result: AnyArray = np.where(is_special, cut, rounded).astype(unsigned, copy=False)
    return result.view(bits.dtype)
