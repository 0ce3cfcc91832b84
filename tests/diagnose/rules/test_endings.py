"""A run that did not finish has a finding about its end; what is not known is not claimed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sonde.diagnose.diagnosis import diagnose
from sonde.diagnose.finding import Finding
from sonde.schema.window import Window

ENDINGS = {"crashed", "out_of_memory", "killed", "disk_full", "interrupted"}


def found(status: str, reason: str = "", *, scalars: dict[str, float] | None = None, **facts: Any) -> list[Finding]:
    steps = np.arange(40)
    columns = {name: (steps, np.full(40, value)) for name, value in {"loss": 1.0, **(scalars or {})}.items()}
    window = Window({}, columns, {"status": status, "reason": reason, **facts})
    return [finding for finding in diagnose(window).findings if finding.rule in ENDINGS]


def error(type: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": type, "message": message, "file": "train.py", "line": 7, "function": "fit", **more}


@pytest.mark.parametrize("status", ["running", "finished"])
def test_a_run_that_goes_well_has_none(status: str) -> None:
    assert found(status, error=error("ValueError", "of an earlier attempt")) == []


@pytest.mark.parametrize(
    ("reason", "rule"),
    [
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 16x64)", "crashed"),
        ("exit code 3", "crashed"),
        ("SIGSEGV (exit code 139)", "crashed"),
        ("MemoryError: ", "out_of_memory"),
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.", "out_of_memory"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 45 bytes.", "out_of_memory"),
        ("SIGKILL (exit code 137)", "killed"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
    ],
)  # fmt: skip
def test_every_kind_of_crash_is_one_critical_finding(reason: str, rule: str) -> None:
    (finding,) = found("crashed", reason)
    assert (finding.rule, str(finding.severity), finding.step) == (rule, "critical", 39)


def test_a_crash_names_the_line_and_keeps_the_traceback() -> None:
    (finding,) = found("crashed", "ValueError: bad `shape`.", error=error("ValueError", "bad `shape`.", traceback="T"))
    assert finding.message == "Training stopped after step 39 in train.py, line 7, in fit: ValueError: bad 'shape'."
    assert finding.traceback == "T"


def test_the_error_of_an_earlier_session_is_not_the_reason_of_this_end() -> None:
    (finding,) = found("crashed", "exit code 3", error=error("ValueError", "earlier", traceback="T"))
    assert "earlier" not in finding.message
    assert finding.traceback == ""


def test_a_lost_process_on_a_full_machine_points_to_the_kernel() -> None:
    lost = {"is_lost": True, "scalars": {"system/memory_percent": 97.0}}
    assert "out-of-memory killer is likely" in found("crashed", "lost", **lost)[0].message
    lost["scalars"] = {"system/memory_percent": 40.0}
    assert "out-of-memory killer is likely" not in found("crashed", "lost", **lost)[0].message


def test_what_held_the_memory_is_named_if_it_is_the_model() -> None:
    model = {
        "shapes": {"act/0": (1024, 1024, 256), "act/1": (64, 1024)},
        "dtypes": {"act/0": "float32", "act/1": "float32"},
    }
    out = error("OutOfMemoryError", "CUDA out of memory", gpu_mib={"allocated": 2000.0, "reserved": 4000.0})
    (finding,) = found("crashed", "OutOfMemoryError: CUDA out of memory", error=out, **model)
    assert "1,000 MiB for activations, most of all 0" in finding.message
    assert "Halve the batch size" in finding.remedy
    assert "expandable_segments" in finding.remedy
    assert finding.sites == ("0", "1")
    out["gpu_mib"]["allocated"] = 80_000.0
    (finding,) = found("crashed", "OutOfMemoryError: CUDA out of memory", error=out, **model)
    assert "something else holds the memory" in finding.message


def test_an_interruption_is_a_remark() -> None:
    (finding,) = found("interrupted", "KeyboardInterrupt")
    assert (finding.rule, str(finding.severity)) == ("interrupted", "info")


def test_a_leak_explains_the_lack_of_memory() -> None:
    steps = np.arange(0, 400, 10)
    from sonde.schema.names import Series

    grows = {Series("model", "model", "rss_mb"): (steps, 1000.0 + 5.0 * steps)}
    window = Window(grows, {"loss": (steps, np.ones(40))}, {"status": "crashed", "reason": "MemoryError: "})
    first, *_ = diagnose(window).findings
    assert first.rule == "memory_leak"
    assert [symptom.rule for symptom in first.cause_of] == ["out_of_memory"]
    assert diagnose(window).is_critical
