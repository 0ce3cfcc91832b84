"""What our own work takes: host time always, GPU time by events that are read later, when the device has passed them.

Nothing here waits. Events are recorded at some steps only; between them the last known times stand. Torch is imported
only once a tensor on a GPU has been seen: a session that logs numbers needs none.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_EVERY: Final = 8
"""For so many steps the GPU time of a kind stands; what is recorded more rarely is measured every time."""
_EAGER: Final = 6
"""The first times are all measured."""
_AT_STEP: Final = ("grads", "optimizer")
_MAX_OPEN: Final = 256
"""Steps whose events are still waited for; older ones are given up."""


@dataclass(slots=True)
class StepTimes:
    """What one step took, and our part of it by what it was for. `gpu_s` is None where no GPU time is known."""

    step: int
    host_s: dict[str, float] = field(default_factory=dict)
    total_host_s: float = 0.0
    launched: set[str] = field(default_factory=set)
    """What the GPU was given work for; host time alone may be added to others."""
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    is_timed: dict[str, bool] = field(default_factory=dict)
    """Of which kinds the GPU time is measured in this step."""
    mark: Any = None
    """Where the first of our work at the optimizer's step was put into the GPU's queue."""
    end: Any = None
    wall_s: float = 0.0
    gpu_s: dict[str, float] | None = None
    step_s: float = 0.0
    """From the end of the step before to the end of this one, by the GPU's clock where there is one."""
    is_host_bound: bool = True
    """The GPU was past the optimizer's step, or nearly so, when the host came to its end: it waits for the host."""


class Meter:
    """One per watched model. `with meter.span("grads"): ...` around everything we do on the training thread."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The GPU on which the model lives, once one is seen."""
        self._now = StepTimes(0)
        self._open: deque[StepTimes] = deque()
        self._num_timed: dict[str, int] = {}
        self._timed_at: dict[str, int] = {}
        self._is_host_bound = True
        self._free: list[Any] = []

    def span(self, kind: str) -> _Span:
        return _Span(self, kind)

    def add(self, kind: str, seconds: float) -> None:
        """Host time that was measured elsewhere."""
        now = self._now
        now.host_s[kind] = now.host_s.get(kind, 0.0) + seconds
        now.total_host_s += seconds

    def measure_anew(self) -> None:
        """What was measured long ago no longer stands: the next times are all measured."""
        self._num_timed.clear()

    @property
    def host_s(self) -> float:
        return self._now.total_host_s

    def end_step(self, step: int, wall_s: float) -> None:
        """Close the step that is over."""
        now, self._now = self._now, StepTimes(step + 1)
        now.step, now.wall_s = step, wall_s
        if self.device is not None and not _is_capturing():
            if now.mark is not None:
                self._is_host_bound = bool(now.mark.query())
            # A step that records nothing has no mark: it is as its neighbours are, or the two could not be compared.
            now.is_host_bound = self._is_host_bound
            now.end = self._event()
        self._open.append(now)
        if len(self._open) > _MAX_OPEN:
            self._open.popleft()

    def _is_timed(self, kind: str) -> bool:
        """Whether this step's GPU time of a kind is measured; all of a step or nothing."""
        known = self._now.is_timed.get(kind)
        if known is None:
            step, num = self._now.step, self._num_timed.get(kind, 0)
            known = self.device is not None and (num < _EAGER or step - self._timed_at[kind] >= _EVERY)
            self._now.is_timed[kind] = known
            if known:
                self._num_timed[kind], self._timed_at[kind] = num + 1, step
        return known

    def done(self) -> list[StepTimes]:
        """Steps that the device has left behind it, in order, each told once."""
        found = []
        while len(self._open) > 1 or (self._open and self._open[0].end is None):
            times = self._open[0]
            if times.end is None:
                times.step_s = times.wall_s
                found.append(self._open.popleft())
                continue
            following = self._open[1]  # its end is needed to tell when this one's successor began
            if following.end is not None and not following.end.query():
                break
            self._open.popleft()
            if following.end is not None:
                following.step_s = times.end.elapsed_time(following.end) / 1e3
            self._read(times)
            if times.step_s:
                found.append(times)
        return found

    def _read(self, times: StepTimes) -> None:
        if times.spans:
            times.gpu_s = {}
            for kind, start, end in times.spans:
                times.gpu_s[kind] = times.gpu_s.get(kind, 0.0) + start.elapsed_time(end) / 1e3
                self._free += [end] if start is times.mark else [start, end]
            times.spans = []
        times.mark = None

    def see(self, tensor: torch.Tensor) -> None:
        """Where the model lives."""
        if self.device is None and tensor.device.type == "cuda":
            self.device = tensor.device

    def _event(self) -> Any:
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


def _is_capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()


class _Span:
    """A piece of our work. An inner one is taken out of the outer one's host time."""

    __slots__ = ("_began_s", "_inside_s", "_kind", "_meter", "_start")

    def __init__(self, meter: Meter, kind: str) -> None:
        self._meter, self._kind = meter, kind
        self._start: Any = None

    def __enter__(self) -> None:
        meter = self._meter
        meter._now.launched.add(self._kind)
        if meter._is_timed(self._kind):
            self._start = meter._event()
        if meter.device is not None and meter._now.mark is None and self._kind in _AT_STEP:
            meter._now.mark = self._start or meter._event()
        self._inside_s = meter.host_s
        self._began_s = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        meter = self._meter
        inside_s = meter.host_s - self._inside_s
        meter.add(self._kind, time.perf_counter() - self._began_s - inside_s)
        if self._start is not None:
            meter._now.spans.append((self._kind, self._start, meter._event()))
