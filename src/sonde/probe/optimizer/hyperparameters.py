"""The hyperparameters of an optimizer: learning rate, weight decay, momentum, betas. Never waits for a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

RATE: Final = "lr"
_NOT_USED: Final = frozenset({"params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
"""Entries of torch's parameter groups that no step uses: a scheduler keeps its own numbers there."""


class Hyperparameters:
    """The hyperparameters of one optimizer: learning rates at every recorded step, others when they change."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int]] = {}
        """The value of each number, and the step it was recorded at."""
        self._step = -1

    def at(self, numbers: Iterable[tuple[str, Any]], step: int) -> list[tuple[int, dict[str, Any]]]:
        """The values to record, as (step, name -> value). Values that are not Python numbers are not compared.

        A value that changes is also recorded at the last step that used it, so that a line between two points is level.
        """
        if step < self._step:
            self._last.clear()  # training went back: earlier records may belong to abandoned steps
        now: dict[str, Any] = {}
        ended: dict[str, Any] = {}
        for name, value in numbers:
            if not isinstance(value, int | float) or name.rpartition("/")[2] == RATE:
                now[name] = value
                continue
            last, since = self._last.get(name, (None, step))
            if value != last:
                now[name] = value
                self._last[name] = value, step
                if last is not None and since < self._step:
                    ended[name] = last
        then, self._step = self._step, step
        return [(then, ended)] * bool(ended) + [(step, now)]


def group_numbers(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The numbers of torch's parameter groups; `group1/lr` belongs to the second group."""
    for place, group in enumerate(groups):
        prefix = f"group{place}/" if place else ""
        for key, value in group.items():
            if key not in _NOT_USED:
                for name, number in _plain(key, value):
                    yield prefix + name, number


def _plain(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """`betas=(0.9, 0.999)` are beta1 and beta2."""
    if isinstance(value, tuple | list):
        base = key if key == "eps" else key.removesuffix("s")
        for place, item in enumerate(value):
            yield from _plain(f"{base}{place + 1}", item)
    elif hasattr(value, "numel"):
        if value.numel() == 1:
            # A number on a device is not waited for; one on the host may be changed in place before it is written.
            yield key, value.item() if value.device.type == "cpu" else value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value
