"""Host memory for snapshots in progress: bounded, allocated once, reused. Knows no tensor names.

A block is a range of bytes, page-locked if the tensors come from a GPU. The next snapshot reuses the memory of earlier
ones; allocating it each time would cost a page fault per 4 KiB, which takes as long as the copy itself.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from sonde.schema.snapshots.tensors import STORAGE
from sonde.session.snapshots.host_memory import HostMemory, NoRoomError

_ALIGN: Final = 64
_MIN_BLOCK: Final = 1 << 12
_MAX_VIEWS: Final = 1 << 16
_CHUNKS: Final = (1 << 14, 1 << 24)


class Block:
    """A range of bytes, as a torch tensor and as a numpy array."""

    __slots__ = ("bytes", "is_pinned", "nbytes", "tensor", "views")

    def __init__(self, nbytes: int, *, is_pinned: bool) -> None:
        self.nbytes, self.is_pinned = nbytes, is_pinned
        self.views: dict[Any, Tensor] = {}
        if is_pinned:
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self.bytes = self.tensor.numpy()
        else:
            self.bytes = np.empty(nbytes, np.uint8)
            self.tensor = torch.from_numpy(self.bytes)


class TensorSlot:
    """The memory that one tensor is copied to."""

    __slots__ = ("_block", "_offset", "dtype", "nbytes", "shape")

    def __init__(self, block: Block, offset: int, source: Tensor) -> None:
        self._block, self._offset = block, offset
        self.nbytes, self.shape, self.dtype = source.nbytes, source.shape, source.dtype

    def tensor(self) -> Tensor:
        """The bytes as a tensor of this dtype and shape; the next snapshot gets the same object if it asks for the
        same."""
        key = self._offset, self.dtype, self.shape
        found = self._block.views.get(key)
        if found is None:
            if len(self._block.views) > _MAX_VIEWS:
                self._block.views.clear()
            flat = self._block.tensor[self._offset : self._offset + self.nbytes]
            found = self._block.views[key] = flat.view(self.dtype).view(self.shape)
        return found

    def bits(self) -> Any:
        """The same bytes as a flat numpy array."""
        return self._block.bytes[self._offset : self._offset + self.nbytes].view(STORAGE[dtype_name(self.dtype)])


class Room:
    """A part of a block for several tensors, side by side."""

    __slots__ = ("_block", "_end", "_start")

    def __init__(self, block: Block, start: int, nbytes: int) -> None:
        self._block, self._start, self._end = block, start, start + nbytes

    def places(self, sources: list[Tensor]) -> list[TensorSlot]:
        found, offset = [], self._start
        for source in sources:
            place = TensorSlot(self._block, offset, source)
            found.append(place)
            offset += _aligned(place.nbytes)
        if offset > self._end:
            raise NoRoomError("a tensor has grown since memory was allocated for it")
        return found


class Staging(HostMemory):
    """The memory of all snapshots of a session, as blocks that are reused."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._free: list[Block] = []

    @property
    def held_bytes(self) -> int:
        return self._used_bytes + sum(block.nbytes for block in self._free)

    def take(self, nbytes: int, *, is_pinned: bool, own_bytes: int = 0, wait_s: float = 0.0) -> Block:
        """A block of at least that size. Waits for others to return theirs; `own_bytes` are the caller's."""
        nbytes = max(nbytes, _MIN_BLOCK)
        with self._lock:
            self._wait_for(nbytes, own_bytes, wait_s)
            left = self.left_bytes
            fitting = [
                b for b in self._free if b.is_pinned == is_pinned and nbytes <= b.nbytes <= min(2 * nbytes, left)
            ]
            block = min(fitting, key=lambda b: b.nbytes, default=None)
            taken = nbytes if block is None else block.nbytes
            if block is not None:
                self._free.remove(block)
            self._used_bytes += taken
            while self._free and self.held_bytes > self.limit_bytes:
                self._free.pop(0)
        if block is not None:
            return block
        try:
            return Block(nbytes, is_pinned=is_pinned)
        except BaseException:
            with self._lock:
                self._used_bytes -= nbytes
            raise

    def give_back(self, blocks: list[Block]) -> None:
        with self._lock:
            self._free.extend(blocks)
            self.release(sum(block.nbytes for block in blocks))

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


class Arena:
    """The memory of one snapshot; grows block by block, and is returned as a whole."""

    def __init__(self, staging: Staging, wait_s: float = 0.0) -> None:
        self._staging = staging
        self.wait_s = wait_s
        """The remaining time that training may wait for memory."""
        self._blocks: list[Block] = []
        self._rest: dict[bool, tuple[Block, int]] = {}
        """The rest of the newest block, by whether it is page-locked."""
        self.nbytes = 0

    def room(self, tensors: list[Tensor], *, may_wait: bool = True) -> Room:
        """Allocate memory for these tensors, all on one device."""
        sizes = [tensor.nbytes for tensor in tensors]
        nbytes = sum(map(_aligned, sizes))
        block, start = self._room(nbytes, is_pinned=bool(tensors) and tensors[0].is_cuda, may_wait=may_wait)
        self.nbytes += sum(sizes)
        return Room(block, start, nbytes)

    def _room(self, nbytes: int, *, is_pinned: bool, may_wait: bool) -> tuple[Block, int]:
        block, used = self._rest.get(is_pinned, (None, 0))
        if block is None or used + nbytes > block.nbytes:
            # Activations come one by one: they share blocks, to avoid thousands of them.
            chunk = min(max(self.nbytes // 8, _CHUNKS[0]), _CHUNKS[1], self._staging.left_bytes)
            block, used = self._take(max(nbytes, chunk), is_pinned=is_pinned, may_wait=may_wait), 0
            self._blocks.append(block)
        self._rest[is_pinned] = block, used + nbytes
        return block, used

    def _take(self, nbytes: int, *, is_pinned: bool, may_wait: bool) -> Block:
        own_bytes, began = sum(block.nbytes for block in self._blocks), time.monotonic()
        wait_s = self.wait_s if may_wait else 0.0
        try:
            return self._staging.take(nbytes, is_pinned=is_pinned, own_bytes=own_bytes, wait_s=wait_s)
        finally:
            self.wait_s = max(self.wait_s - (time.monotonic() - began), 0.0)

    def release(self) -> None:
        blocks, self._blocks = self._blocks, []
        self._rest.clear()
        self.nbytes = 0
        self._staging.give_back(blocks)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
