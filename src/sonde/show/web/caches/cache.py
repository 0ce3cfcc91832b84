"""A thread-safe LRU cache with a limit in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class ByteCache(Generic[Value]):
    """Values with their sizes. A value larger than the whole cache is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: Value, num_bytes: int) -> None:
        with self._lock:
            self._drop(key)
            if num_bytes > self.max_bytes:
                return
            self._values[key] = value, num_bytes
            self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._values)))

    def _drop(self, key: Hashable) -> None:
        old = self._values.pop(key, None)
        self.num_bytes -= 0 if old is None else old[1]

    def __len__(self) -> int:
        return len(self._values)
