"""Throttling of slow replies: one thread computes each and others wait; a running run is not recomputed every step."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Value = TypeVar("Value")

REST_FACTOR: Final = 10.0
"""A value is reused for 10 times as long as it took to compute."""
MIN_REST_S: Final = 3.0
_MAX_KEPT: Final = 64


@dataclass(slots=True)
class _Kept(Generic[Value]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: object = None
    value: Value | None = None
    fresh_until: float = 0.0


class ThrottledAnswers(Generic[Value]):
    """The last value by key, with the version of its source."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Kept[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, version: object, work: Callable[[], Value], *, is_moving: bool) -> Value:
        """The last value if its version matches, or if it is recent and its source is still changing.

        Otherwise calls `work`. If the source has stopped changing, a new value is always computed: it is the final one.
        """
        kept = self._slot(key)
        with kept.lock:
            is_fresh = kept.version == version or (is_moving and time.monotonic() < kept.fresh_until)
            if kept.value is not None and is_fresh:
                return kept.value
            began = time.monotonic()
            kept.value, kept.version = work(), version
            kept.fresh_until = time.monotonic() + max(REST_FACTOR * (time.monotonic() - began), MIN_REST_S)
            return kept.value

    def _slot(self, key: Hashable) -> _Kept[Value]:
        with self._lock:
            kept = self._kept.pop(key, None) or _Kept[Value]()
            self._kept[key] = kept
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return kept
