"""Turned off is an object that does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from sonde.schema.layout import RunStatus
from sonde.session.keywords import Optimizers, WatchKeywords, spelled_out

if TYPE_CHECKING:
    from torch import nn


class NullSession:
    """A session that does nothing: sonde is disabled, or this process does not record."""

    path: Path | None = None
    is_finished = is_fresh = False
    step_number = 0

    @spelled_out(WatchKeywords)
    def watch(self, model: nn.Module, optimizer: Optimizers = None, **keywords: Unpack[WatchKeywords]) -> NullSession:
        return self

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None: ...

    def step(self) -> None: ...

    def skip_step(self) -> None: ...

    def tap(self, name: str, tensor: Any) -> None: ...

    def snapshot(self, kinds: str | Iterable[str] | None = None) -> int | None:
        return None

    def batch(self, inputs: Any, targets: Any = None, *, ids: Any = None) -> None: ...

    @property
    def next_step(self) -> int:
        return self.step_number

    def rewind(self, step: int) -> bool:
        return False

    def flush(self, timeout_s: float = 30.0) -> bool:
        return True

    def finish(self, status: RunStatus = "finished", reason: str = "", *, deadline_s: float | None = None) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def __repr__(self) -> str:
        return "<sonde.NullSession>"
