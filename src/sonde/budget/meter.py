"""The time of our own work: host time always, GPU time by events that are read later, when the device has passed them.

Nothing here waits. Events are recorded at some steps only; in between, the last known times are used. Torch is imported
only once a tensor on a GPU has been seen: a session that logs numbers does not need it.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

_EVERY: Final = 8
"""Number of steps for which the GPU time of a kind stays valid; rarer kinds are measured every time."""
_EAGER: Final = 6
"""The first times are all measured."""
_AT_STEP: Final = ("grads", "optimizer")
_MAX_OPEN: Final = 256
"""Steps whose events are still pending; older ones are dropped."""


@dataclass(slots=True)
class StepTimes:
    """The time of one step, and our part of it by kind. `gpu_s` is None if no GPU time is known."""

    step: int
    host_s: dict[str, float] = field(default_factory=dict)
    other_s: float = 0.0
    """Host time that belongs to no kind."""
    launched: set[str] = field(default_factory=set)
    """Kinds that launched work on the GPU; for other kinds only host time may be added."""
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    is_timed: dict[str, bool] = field(default_factory=dict)
    """Kinds whose GPU time is measured in this step."""
    mark: Any = None
    """The event before our first work at the optimizer's step in the GPU's queue."""
    end: Any = None
    wall_s: float = 0.0
    num_rested: int = 0
    """Number of steps, all of which were only counted; `step` is the last of them. 0 for a step that was followed."""
    gpu_s: dict[str, float] | None = None
    step_s: float = 0.0
    """From the end of the previous step to the end of this one, by the GPU's clock if there is one."""
    is_exact: bool = True
    """Whether that is so; without the end of the previous step it is the host's time."""
    is_host_bound: bool = True
    """Whether the GPU had (nearly) finished the optimizer's step when the host did: then it waits for the host."""


class Meter:
    """One per training thread. `with meter.span("grads"): ...` surrounds our work; `span("")` if it is of no kind."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        """The GPU of the model, once one is seen."""
        self._now = StepTimes(0)
        self._open: deque[StepTimes] = deque()
        self._num_timed: dict[str, int] = {}
        self._timed_at: dict[str, int] = {}
        self._is_host_bound = True
        self._free: list[Any] = []
        self.host_s = 0.0
        """All host time so far."""

    def span(self, kind: str) -> _Span | _OtherSpan:
        return _Span(self, kind) if kind else _OtherSpan(self)

    def add(self, kind: str, seconds: float) -> None:
        """Add host time that was measured elsewhere."""
        now = self._now
        if kind:
            now.host_s[kind] = now.host_s.get(kind, 0.0) + seconds
        else:
            now.other_s += seconds
        self.host_s += seconds

    @property
    def is_recording(self) -> bool:
        """Whether anything was recorded since the last step was closed."""
        return bool(self._now.host_s)

    def pass_by(self) -> float:
        """Forget the step that is over, which recorded nothing. Returns our time in it."""
        other_s, self._now.other_s = self._now.other_s, 0.0
        return other_s

    def end_step(self, step: int, wall_s: float) -> None:
        """Close the step that is over."""
        now, self._now = self._now, StepTimes(step + 1)
        now.step, now.wall_s = step, wall_s
        if self.device is not None and not _is_capturing():
            if now.mark is not None:
                self._is_host_bound = bool(now.mark.query())
            # A step that records nothing has no mark: it must resemble its neighbours, or the two could not be
            # compared.
            now.is_host_bound = self._is_host_bound
            now.end = self._event()
        self._put(now)

    def end_rest(self, step: int, num_steps: int) -> None:
        """Steps that were only counted are over; `step` is the last of them."""
        if self.device is not None and not _is_capturing():
            self._put(StepTimes(step, end=self._event(), num_rested=num_steps))

    def _put(self, times: StepTimes) -> None:
        self._open.append(times)
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
        """Steps that the device has finished, in order, each returned once."""
        found = []
        while len(self._open) > 1 or (self._open and self._open[0].end is None):
            times = self._open[0]
            if times.end is None:
                times.step_s = times.wall_s
                found.append(self._open.popleft())
                continue
            following = self._open[1]  # its end marks the start of its successor
            if following.end is not None and not following.end.query():
                break
            self._open.popleft()
            if following.end is not None and following.step == times.step + max(following.num_rested, 1):
                following.step_s = times.end.elapsed_time(following.end) / 1e3
            self._read(times)
            if not times.step_s:
                times.step_s, times.is_exact = times.wall_s, False
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
        """Set the device of the model."""
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


class _OtherSpan:
    """A piece of our work that belongs to no kind."""

    __slots__ = ("_began_s", "_inside_s", "_meter")

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._inside_s = self._meter.host_s
        self._began_s = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        meter = self._meter
        own_s = time.perf_counter() - self._began_s - (meter.host_s - self._inside_s)
        meter._now.other_s += own_s
        meter.host_s += own_s


class _Span:
    """A piece of our work. The host time of an inner span is subtracted from the outer one."""

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
