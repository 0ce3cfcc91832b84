"""The numbers of a benchmark: intervals, bytes on disk, the machine they were measured on, and the table."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from sonde.distribution import DISTRIBUTION

PACKAGES = (DISTRIBUTION, "torch", "numpy", "pyarrow", "wandb", "tensorboard")


def interval(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The median, and the 95 % bootstrap interval of the median."""
    sample = np.asarray(values)
    picks = np.random.default_rng(0).integers(len(sample), size=(2000, len(sample)))
    low, high = np.quantile(np.median(sample[picks], axis=1), [0.025, 0.975])
    return float(np.median(sample)), (float(low), float(high))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Sealed statistics on disk: number of rows, and of bytes with and without the histograms."""

    num_rows: int
    all_bytes: int
    bytes_without_hist: int


def stats_row_bytes(folder: Path) -> RowBytes | None:
    """Rows and bytes, from the footers of the Parquet segments; None if there are no segments."""
    import pyarrow.parquet as pq

    segments = [path for path in folder.rglob("seg-*.parquet") if "stats" in path.parts]
    if not segments:
        return None
    num_rows = hist_bytes = 0
    for segment in segments:
        footer = pq.read_metadata(segment)
        num_rows += footer.num_rows
        for group in range(footer.num_row_groups):
            columns = [footer.row_group(group).column(i) for i in range(footer.num_columns)]
            hist_bytes += sum(c.total_compressed_size for c in columns if c.path_in_schema.startswith("hist."))
    all_bytes = sum(segment.stat().st_size for segment in segments)
    return RowBytes(num_rows, all_bytes, all_bytes - hist_bytes)


def describe_machine(*, threads: int) -> dict[str, Any]:
    """Everything needed to reproduce the numbers, and nothing that identifies the machine."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "src")),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "torch_threads": threads,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def as_markdown(report: dict[str, Any]) -> str:
    """One table per model, and an explanation of the columns below them."""
    machine, versions = report["machine"], report["versions"]
    changed = " with uncommitted changes" if report["uncommitted_changes"] else ""
    kernel = "with" if report["native_kernel"] else "without"
    lines = [
        "# Overhead of recording",
        "",
        f"Made by `{report['command'].strip()}` on {report['date']}, commit `{report['commit']}`{changed}:",
        f"{machine['processor']}, {machine['cores']} cores, {machine['torch_threads']} torch thread(s); "
        + ", ".join(f"{name} {number}" for name, number in versions.items() if number)
        + f"; {kernel} the native kernel. {report['rounds']} rounds; medians with 95 % bootstrap intervals.",
    ]
    for model in report["models"].values():
        lines += ["", f"## {model['what']}", ""]
        lines += [f"{model['num_parameters']:,} parameters in {model['num_tensors']} tensors.", ""]
        lines += [
            "| arm | CPU ratio | wall ratio | added CPU ms/step | relative to wandb | bytes/step | bytes/row |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_row(name, arm) for name, arm in model["arms"].items()]
    lines += ["", *_explanation(report)]
    return "\n".join(lines) + "\n"


def _row(name: str, arm: dict[str, Any]) -> str:
    share = arm["relative_to_wandb"]
    row_bytes = arm["bytes_per_row_without_hist"]
    cells = [
        f"**{name}**" if name.startswith("sonde") else name,
        _ratio(arm["cpu_ratio"], arm["cpu_interval"]),
        _ratio(arm["wall_ratio"], arm["wall_interval"]),
        f"{arm['added_cpu_ms_per_step']:.2f}",
        "" if share is None else f"{share:.1%}",
        f"{arm['bytes_per_step']:,.0f}",
        "" if row_bytes is None else f"{row_bytes:.1f} (with histograms {arm['bytes_per_row']:.1f})",
    ]
    return "| " + " | ".join(cells) + " |"


def _ratio(value: float, bounds: Sequence[float]) -> str:
    return f"{value:.3f} ({bounds[0]:.3f} to {bounds[1]:.3f})"


def _explanation(report: dict[str, Any]) -> list[str]:
    arms: dict[str, str] = {}
    for model in report["models"].values():
        arms |= {name: arm["what"] for name, arm in model["arms"].items()}
    return [
        *(f"- **{name}**: {what}." for name, what in arms.items()),
        "",
        "CPU time counts all threads of the training process and everything an arm had left to write when its block of",
        "steps ended; wall time ends with the last step. Separate processes that a tool starts are not counted. Bytes",
        "per row are those of sealed statistics without and with histograms. `base again` is the same as `base`: their",
        "difference is the noise of this machine.",
        "",
        "Not in the ratios: the time to close a recording, which for sonde includes sealing the rest of the log.",
        "In CPU ms per recording: " + _finishes(report) + ".",
    ]


def _finishes(report: dict[str, Any]) -> str:
    parts = []
    for name, model in report["models"].items():
        sonde = {arm: result for arm, result in model["arms"].items() if arm.startswith("sonde")}
        parts += [f"{name}, {arm}: {r['finish_cpu_ms']:.0f} after {r['steps']} steps" for arm, r in sonde.items()]
    return "; ".join(parts)
