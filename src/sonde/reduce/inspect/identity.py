"""The identity of a batch: one integer below 2**53, from a sample of its elements and its shapes.

The same batch gives the same number on the same type of device. Imports torch only for torch tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from sonde.reduce.inspect.strides import NUM_BITS, strided

_FEW: Final = 4096


def batch_hash(values: Sequence[Any]) -> Any:
    """One number for all of these tensors or arrays; a tensor if they are on a device, None if there are none.

    >>> batch_hash([np.arange(4)]) == batch_hash([np.arange(4)]), batch_hash([np.arange(4)]) == batch_hash([np.ones(4)])
    (True, False)
    """
    parts = [part for part in map(_sampled, values) if part is not None]
    if not parts:
        return None
    on_host = [part.tobytes() for part in parts if isinstance(part, np.ndarray)]
    on_device = [part for part in parts if not isinstance(part, np.ndarray)]
    shapes = [_shape(value.shape, value.dtype) for value in values if hasattr(value, "shape")]
    seed = _digest([*shapes, *on_host])
    if not on_device:
        return seed
    from sonde.reduce.inspect.bits import device_hash

    return device_hash(on_device, seed)


def ids_hash(ids: Any) -> Any:
    """The same for the names of a batch's samples: numbers, strings, an array or a tensor."""
    if ids is None:
        return None
    if hasattr(ids, "dtype") and hasattr(ids, "shape"):
        return batch_hash([ids])
    items = ids if isinstance(ids, Iterable) and not isinstance(ids, str | bytes) else [ids]
    return _digest(str(item).encode() + b"\0" for item in items)


def label_purity(labels: Any, ignore_index: int = -100) -> Any:
    """Fraction of the most common label, if labels are whole numbers: 1 for a batch of one class, None for other
    targets.

    >>> label_purity(np.array([3, 3, 3, 1, -100]))
    0.75
    """
    if hasattr(labels, "detach") and (labels.is_floating_point() or labels.is_complex()):
        return None
    sampled = _sampled(labels)
    if isinstance(sampled, np.ndarray) and sampled.dtype.kind in "biu":
        valid = sampled[sampled != ignore_index]
        return _largest_count(valid) / len(valid) if len(valid) else None
    if sampled is None or isinstance(sampled, np.ndarray):
        return None
    from sonde.reduce.inspect.bits import device_purity

    return device_purity(sampled, ignore_index) if sampled.numel() else None


def _largest_count(numbers: Any) -> int:
    if int(numbers.min()) >= 0 and int(numbers.max()) < _FEW:
        return int(np.bincount(numbers).max())
    return int(np.unique(numbers, return_counts=True)[1].max())


@lru_cache(maxsize=1024)
def _shape(shape: Any, dtype: Any) -> bytes:
    return f"{tuple(shape)}{dtype};".encode()


def _sampled(value: Any) -> Any:
    if hasattr(value, "detach"):
        from sonde.reduce.inspect.bits import sampled_bits

        return sampled_bits(value)
    array = np.asarray(value)
    return strided(array.reshape(-1), array.size) if array.dtype.kind in "biufc" else None


def _digest(parts: Iterable[bytes]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> (64 - NUM_BITS)
