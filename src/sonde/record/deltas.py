"""The bits of the last snapshot, kept so that the next one can be written as the difference, where that is smaller.

A chain of differences is cut by a snapshot without any at least every `KEYFRAME_EVERY` snapshots: reading a tensor
reads at most so many.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sonde.record.codecs import CHANGE_LITTLE, codec_for
from sonde.schema.lake import difference
from sonde.schema.tensors import AnyArray, HostTensor, kind_of

KEYFRAME_EVERY: Final = 8
_MUST_WIN: Final = 0.9
"""A difference costs a second read: it must save a tenth at least."""
_SAMPLES: Final = 4
_FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})


class Deltas:
    """Which tensors are differences to the snapshot before, and to what. `limit` is in bytes; 0: none are."""

    def __init__(self, limit: int, compression: str) -> None:
        self._limit = 0 if compression == "none" else limit
        self._compression = compression
        self._bits: dict[str, AnyArray] = {}
        self._step = -1
        self._num_since_keyframe = 0
        self._wins: dict[str, bool] = {}

    @property
    def step(self) -> int:
        """The snapshot that differences are to."""
        return self._step

    def choose(self, tensors: dict[str, HostTensor]) -> set[str]:
        """The tensors of a snapshot that will be written as differences."""
        if self._step < 0 or self._num_since_keyframe + 1 >= KEYFRAME_EVERY:
            self._wins = {}
            return set()
        return {name for name, tensor in tensors.items() if self._is_smaller(name, tensor)}

    def before(self, name: str) -> AnyArray:
        return self._bits[name]

    def keep(self, name: str, tensor: HostTensor, bits: AnyArray) -> None:
        """Remember what a tensor is now; the bits may be reused by their owner afterwards."""
        known = self._bits.get(name)
        if known is not None and known.dtype == bits.dtype and known.size == bits.size:
            np.copyto(known, bits)
            return
        self._bits.pop(name, None)
        if self._is_wanted(name, tensor):
            self._bits[name] = bits.copy()

    def written(self, step: int, tensors: dict[str, HostTensor], chosen: set[str]) -> None:
        """The snapshot is on disk: the next one may be a difference to it."""
        self._num_since_keyframe = self._num_since_keyframe + 1 if chosen else 0
        self._step = step
        for name in self._bits.keys() - tensors.keys():
            del self._bits[name]

    def forget(self) -> None:
        """Half a snapshot was kept: the next one stands by itself."""
        self._bits, self._wins = {}, {}
        self._step, self._num_since_keyframe = -1, 0

    def _is_wanted(self, name: str, tensor: HostTensor) -> bool:
        if kind_of(name) not in CHANGE_LITTLE or tensor.dtype not in _FLOATS or not tensor.nbytes:
            return False
        return sum(bits.nbytes for bits in self._bits.values()) + tensor.nbytes <= self._limit

    def _is_smaller(self, name: str, tensor: HostTensor) -> bool:
        before = self._bits.get(name)
        if before is None or before.size != tensor.bits.size or before.dtype != tensor.bits.dtype:
            return False
        if name not in self._wins:
            codec = codec_for(kind_of(name), self._compression)
            bits = _sample(tensor.flat())
            self._wins[name] = len(codec.encode(difference(bits, _sample(before)))) < _MUST_WIN * len(
                codec.encode(bits)
            )
        return self._wins[name]


def _sample(bits: AnyArray) -> AnyArray:
    """A few runs from all over a tensor, a sixteenth of it and at most 64 KiB."""
    wanted = min(max(bits.nbytes // 16, 4096), 64 << 10) // bits.itemsize
    if bits.size <= wanted:
        return bits
    length = wanted // _SAMPLES
    starts = np.linspace(0, bits.size - length, _SAMPLES).astype(int)
    return np.concatenate([bits[start : start + length] for start in starts])
