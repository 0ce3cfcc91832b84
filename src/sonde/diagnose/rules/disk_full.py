"""No space was left on a disk: the program stopped, or parts of the recording are missing."""

from __future__ import annotations

from collections.abc import Iterator

from sonde.diagnose.measures.ending import Kind, ending, is_disk_full
from sonde.diagnose.measures.events import happenings
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted
from sonde.schema.window import Window


@rule(severity="critical", is_measured=True, references=("errno: ENOSPC, EDQUOT",))
def disk_full(window: Window) -> Iterator[Found]:
    """The disk was full."""
    end = ending(window)
    if end is not None and end.kind is Kind.DISK:
        where = f" in {end.place}" if end.place else ""
        yield Found(
            f"Training stopped {end.when}{where} because the disk is full: {end.reason}.",
            step=end.step,
            confidence=1.0,
            traceback=end.traceback,
            remedy="Free some space or raise the quota (`df -h`, `du -sh *`). Keep fewer checkpoints and "
            "snapshots, or write them to another disk.",
        )
        return
    gaps = [event for event in happenings(window, "gap") if is_disk_full(str(event.details.get("reason", "")))]
    if gaps:
        num = sum(int(event.details.get("num_dropped") or 0) for event in gaps)
        yield Found(
            f"The disk of the run folder was full {counted(len(gaps), 'time')}; {counted(num, 'record')} could not be "
            "kept.",
            step=max(gaps[0].step, 0),
            last_step=max(gaps[-1].step, 0),
            confidence=1.0,
            severity="warning",
            remedy="Free some space, or record to another disk: `sonde.watch(..., dir='/other/disk/runs')`.",
        )
