"""How the tensors of a snapshot are shared out among arrays: small ones of a kind and type together, large ones alone.

An array costs files, and a file costs an fsync: a model of a thousand small tensors must not have a thousand arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from sonde.record.codecs import Codec, codec_for
from sonde.schema.shards import Layout, cut
from sonde.schema.tensors import HostTensor, kind_of, own_array_name, packed_array_name, storage_dtype

LARGE_BYTES: Final = 16 << 20
SHARD_BYTES: Final = 1 << 30
_MIN_CHUNK_BYTES: Final = 16 << 10
_PACK_CHUNK_BYTES: Final = 256 << 10
_LARGE_CHUNK_BYTES: Final = 1 << 20
_CHUNKS_PER_PACK: Final = 256
"""A pack of few bytes has smaller chunks, so that one of its tensors is still read without the others."""


@dataclass(frozen=True, slots=True)
class ArrayPlan:
    """One array and the tensors in it, in order."""

    name: str
    layout: Layout
    codec: Codec
    tensors: tuple[str, ...]
    is_packed: bool


def plan_arrays(
    tensors: Mapping[str, HostTensor],
    is_delta: Callable[[str], bool],
    *,
    compression: str = "auto",
    shard_bytes: int = SHARD_BYTES,
) -> list[ArrayPlan]:
    """The arrays of a snapshot."""
    plans: list[ArrayPlan] = []
    packs: dict[tuple[str, str, bool], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.nbytes >= LARGE_BYTES:
            plans.append(_alone(name, tensor, is_delta(name), compression, shard_bytes))
        else:
            packs.setdefault((kind_of(name), tensor.dtype, is_delta(name)), []).append(name)
    for (kind, dtype, delta), names in packs.items():
        size = sum(tensors[name].bits.size for name in names)
        codec = codec_for(kind, compression)
        layout = cut(
            (size,),
            _element(dtype, delta),
            chunk_bytes=_pack_chunk_bytes(size * storage_dtype(dtype).itemsize),
            shard_bytes=shard_bytes,
            is_compressed=codec.is_compressed,
        )
        name = packed_array_name(kind, dtype, is_delta=delta)
        plans.append(ArrayPlan(name, layout, codec, tuple(names), is_packed=True))
    return plans


def _alone(name: str, tensor: HostTensor, delta: bool, compression: str, shard_bytes: int) -> ArrayPlan:
    codec = codec_for(kind_of(name), compression)
    layout = cut(
        tensor.shape,
        _element(tensor.dtype, delta),
        chunk_bytes=_LARGE_CHUNK_BYTES,
        shard_bytes=shard_bytes,
        is_compressed=codec.is_compressed,
    )
    return ArrayPlan(own_array_name(name, is_delta=delta), layout, codec, (name,), is_packed=False)


def _element(dtype: str, delta: bool) -> str:
    storage = storage_dtype(dtype)
    return f"uint{8 * storage.itemsize}" if delta else storage.name


def _pack_chunk_bytes(nbytes: int) -> int:
    wanted = max(nbytes // _CHUNKS_PER_PACK, _MIN_CHUNK_BYTES)
    return min(1 << wanted.bit_length() - 1, _PACK_CHUNK_BYTES)
