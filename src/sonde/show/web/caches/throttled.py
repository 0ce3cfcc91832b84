"""Answers that take long: one thread works on each, others wait for it; a running run is not judged at every step."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Value = TypeVar("Value")

REST_FACTOR: Final = 10.0
"""What took a second is not worked out again for ten."""
MIN_REST_S: Final = 3.0
_MAX_KEPT: Final = 64


@dataclass(slots=True)
class _Kept(Generic[Value]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    version: object = None
    value: Value | None = None
    fresh_until: float = 0.0


class ThrottledAnswers(Generic[Value]):
    """By key, the last value and the version of what it was made from."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, _Kept[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, version: object, work: Callable[[], Value], *, is_moving: bool) -> Value:
        """What is known, if it is of this version, or was made a moment ago of something that moves on anyway.

        Else what `work` gives. What has come to rest is always answered anew: nobody would ask again later.
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
