"""The process disappeared: nothing in it could say why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.ending import Kind, ending, last_of
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

FULL: Final = 90.0
"""Percent of the host's memory in use at the last reading; above it, the kernel's out-of-memory killer is likely."""


@rule(severity="critical", is_measured=True, references=("Linux kernel documentation: Out of Memory Management",))
def killed(window: Window) -> Iterator[Found]:
    """The process was killed, or its machine stopped."""
    end = ending(window)
    if end is None or end.kind is not Kind.KILLED:
        return
    used = last_of(window, "system/memory_percent")
    is_full = used > FULL
    likely = (
        f": {number(used, 3)} % of the host's memory was in use, so the kernel's out-of-memory killer is likely"
        if is_full
        else ": kill -9, a memory limit of the container or job, a crash in native code, or a power loss"
    )
    yield Found(
        f"The process disappeared {end.when} without an error{likely}.",
        step=end.step,
        confidence=0.9 if is_full else 0.8,
        evidence=[
            Evidence(name, value, healthy, meaning=meaning)
            for name, healthy, meaning in (
                ("system/memory_percent", "below 90", "memory of the host in use, in %"),
                ("system/process_rss_mib", "", "memory of the process in MiB"),
            )
            if (value := last_of(window, name)) >= 0
        ],
        remedy="Use less host memory: fewer `num_workers`, smaller prefetching, memory-mapped data. "
        "`journalctl -k | grep -i oom` confirms it."
        if is_full
        else "Look for the cause outside the program: `journalctl -k | grep -i oom`, the job's log (`sacct -j ID`), "
        "`kubectl describe pod`. For a crash in native code, run with `python -X faulthandler`. Then continue from the "
        "last checkpoint.",
    )
