"""The compression of each kind of tensor, and optional rounding. Knows no file.

Weights and optimizer state are worth the time that zstd takes. Gradients and activations are noise in all but their
exponents: the fastest codec is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from sonde.errors import MissingPackageError, UnknownNameError, UsageError
from sonde.schema.snapshots.tensors import AnyArray

Shuffle = Literal["noshuffle", "shuffle", "bitshuffle"]
_SHUFFLES: Final[dict[Shuffle, int]] = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}
_MAX_LEVEL: Final = 9

Compression: TypeAlias = str | Mapping[str, str]
"""auto, none, zstd or lz4; with a level, as in `zstd:5`; or such a text for each kind, auto for the others."""
COMPRESSIONS: Final = ("auto", "none", "zstd", "lz4")
_MANTISSA: Final = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


@dataclass(frozen=True, slots=True)
class Codec:
    """One of blosc's codecs, or none at all."""

    name: Literal["none", "zstd", "lz4"]
    shuffle: Shuffle = "shuffle"
    level: int = 1

    @property
    def is_compressed(self) -> bool:
        return self.name != "none"

    def encode(self, run: AnyArray) -> bytes:
        if not self.is_compressed:
            return run.tobytes()
        from numcodecs import blosc

        shuffle = self._shuffle(run.dtype.itemsize)
        data: bytes = blosc.compress(run, self.name.encode(), self.level, _SHUFFLES[shuffle], 0)
        return data

    def to_json(self, itemsize: int) -> list[dict[str, Any]]:
        """The codec's name in Zarr v3."""
        if not self.is_compressed:
            return []
        configuration = {
            "cname": self.name,
            "clevel": self.level,
            "shuffle": self._shuffle(itemsize),
            "typesize": itemsize,
            "blocksize": 0,
        }
        return [{"name": "blosc", "configuration": configuration}]

    def _shuffle(self, itemsize: int) -> Shuffle:
        return "noshuffle" if itemsize == 1 and self.shuffle == "shuffle" else self.shuffle


NONE: Final = Codec("none")
_ZSTD: Final = Codec("zstd", "shuffle")
_LZ4: Final = Codec("lz4", "bitshuffle", 5)
_BY_KIND: Final[dict[str, Codec]] = {
    "param": _ZSTD, "optim": _ZSTD, "update": _ZSTD, "grad": _LZ4, "act": _LZ4, "actgrad": _LZ4, "probe": _LZ4,
    "batch": _ZSTD, "custom": _ZSTD,
}  # fmt: skip


def codec_for(kind: str, compression: Compression) -> Codec:
    """The codec for a kind of tensor under a setting.

    >>> codec_for("grad", "auto").name, codec_for("grad", {"grad": "zstd:5"}).level, codec_for("param", "lz4").level
    ('lz4', 5, 5)
    """
    if not isinstance(compression, str):
        compression = compression.get(kind, "auto")
    name, colon, level = compression.partition(":")
    if name not in COMPRESSIONS:
        raise UnknownNameError("compression", compression, COMPRESSIONS)
    if name == "auto":
        codec = _BY_KIND.get(kind, _ZSTD)
    else:
        codec = {"none": NONE, "zstd": _ZSTD, "lz4": _LZ4}[name]
    if not colon:
        return codec
    if not codec.is_compressed or not level.isdigit() or int(level) > _MAX_LEVEL:
        raise UsageError(f'compression "{compression}" has no such level; write {name}:0 to {name}:{_MAX_LEVEL}.')
    return replace(codec, level=int(level))


def check_compression(compression: Compression) -> None:
    """Refuse an unknown codec, level or kind."""
    if isinstance(compression, str):
        codec_for("param", compression)
        return
    if not isinstance(compression, Mapping):
        raise UsageError(f'compression= must be text such as "zstd:3", or a map from kinds to it; got {compression!r}.')
    for kind, text in compression.items():
        if kind not in _BY_KIND:
            raise UnknownNameError("kind of tensor", str(kind), _BY_KIND)
        codec_for(kind, str(text))


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
