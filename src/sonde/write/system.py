"""System metrics: CPU, memory, disk, and GPUs if NVML responds. A number that cannot be read is absent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from sonde.schema.records import SystemSample
from sonde.schema.words import MIB

_GIB: Final = 1 << 30
_LEAST_S: Final = 0.1
"""In less time psutil counts too few ticks and reports a false 0 %."""
_UNREADABLE: Final = (psutil.Error, OSError, RuntimeError, ValueError, AttributeError, NotImplementedError)


class SystemSampler:
    """Samples the machine on request. Percentages cover the time since the previous sample.

    >>> "memory_percent" in SystemSampler(Path(".")).sample(step=0).values
    True
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._process: Any = None
        self._gpus: list[tuple[int, Any]] | None = None
        self._cpu_since = time.monotonic()
        with suppress(*_UNREADABLE):
            self._process = psutil.Process()
            self._process.cpu_percent()
            psutil.cpu_percent()

    def sample(self, step: int) -> SystemSample:
        values: dict[str, float] = {}
        for part in (self._cpu, self._memory, self._disk, self._gpu):
            with suppress(*_UNREADABLE):
                values.update(part())
        return SystemSample(time=time.time(), step=step, values=values)

    def _cpu(self) -> Iterator[tuple[str, float]]:
        if time.monotonic() >= self._cpu_since + _LEAST_S:
            self._cpu_since = time.monotonic()
            yield "cpu_percent", psutil.cpu_percent()
            yield "process_cpu_percent", self._process.cpu_percent()
        yield "process_num_threads", float(self._process.num_threads())
        yield "load_1m", os.getloadavg()[0]

    def _memory(self) -> Iterator[tuple[str, float]]:
        memory = psutil.virtual_memory()
        yield "memory_percent", memory.percent
        yield "memory_available_gib", memory.available / _GIB
        yield "process_rss_mib", self._process.memory_info().rss / MIB

    def _disk(self) -> Iterator[tuple[str, float]]:
        usage = psutil.disk_usage(str(self._run))
        yield "disk_percent", usage.percent
        yield "disk_free_gib", usage.free / _GIB

    def _gpu(self) -> Iterator[tuple[str, float]]:
        if self._gpus is None:
            self._gpus = _find_gpus()
        for index, handle in self._gpus:
            yield from _read_gpu(f"gpu{index}", handle)


def _find_gpus() -> list[tuple[int, Any]]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [(i, pynvml.nvmlDeviceGetHandleByIndex(i)) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []


def _read_gpu(name: str, handle: Any) -> Iterator[tuple[str, float]]:
    import pynvml

    readings: dict[str, Callable[[], float]] = {
        "percent": lambda: float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory_used_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / _GIB,
        "memory_total_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).total / _GIB,
        "temperature_c": lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    }
    for what, read in readings.items():
        try:
            yield f"{name}_{what}", read()
        except pynvml.NVMLError:  # a card without that sensor
            continue
