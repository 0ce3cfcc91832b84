"""`sonde doctor`: would recording work here? Tries what a training run needs and says what to do about what fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import typer

from sonde.cli.info import package_version
from sonde.cli.options import Dir, Json
from sonde.cli.output import print_json
from sonde.show.term.number import size

OLDEST_PYTHON: Final = (3, 11)
OLDEST_TORCH: Final = (2, 10)
"""The last four minor versions are supported."""
LITTLE_SPACE: Final = 1 << 30
NO_SPACE: Final = 64 << 20
SLOW_FSYNC_S: Final = 0.1
TORCH_TIMEOUT_S: Final = 120

# Package, extra, what it is for.
OPTIONAL: Final = (
    ("nvidia-ml-py", "gpu", "GPU metrics"),
    ("h5py", "h5", "export to HDF5"),
    ("wandb", "wandb", "forwarding to Weights & Biases"),
    ("tensorboard", "tensorboard", "forwarding to TensorBoard"),
)

Level = Literal["ok", "note", "warning", "problem"]


class Check(NamedTuple):
    """One thing that was tried. A "problem" would break recording; a "note" is only worth knowing."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def doctor(dir: Dir = None, json: Json = False) -> None:
    """Check that recording would work here.

    Tries versions, disk, locks, clock, GPU and optional packages.

    Exits 1 when something would break a training run.

    \b
    Examples:
      sonde doctor
      sonde doctor --dir /scratch/runs
      sonde doctor --json
    """
    checks = list(run_checks(dir))
    if json:
        print_json([check._asdict() for check in checks])
    else:
        _show(checks)
    raise typer.Exit(int(any(check.level == "problem" for check in checks)))


def run_checks(dir: Path | None) -> Iterator[Check]:
    """Every check in turn."""
    yield check_python()
    yield check_torch()
    from sonde.cli.options import runs_dir
    from sonde.errors import SettingsError

    try:
        folder = runs_dir(dir)
    except SettingsError as error:
        yield Check("settings", "problem", str(error), "Correct the setting; `sonde info --settings` shows them all.")
        return
    yield Check("settings", "ok", f"runs are kept in {folder.absolute()}")
    yield from check_folder(folder)
    yield check_clock()
    yield check_gpu()
    for package, extra, purpose in OPTIONAL:
        found = package_version(package)
        remedy = "" if found else f"For {purpose}:  pip install 'sonde[{extra}]'"
        yield Check(package, "ok" if found else "note", found or "not installed", remedy)


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", "problem", version, f"Install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer.")
    return Check("python", "ok", version)


def check_torch() -> Check:
    """Whether torch is there, young enough, and can be imported; in a process of its own."""
    version = package_version("torch")
    if version is None:
        return Check("torch", "note", "not installed", "Looking at runs works without; to record:  pip install torch")
    code = (
        "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)\n"
        "from sonde.reduce.cpu import native; print('native' if native.kernel() else 'no native')"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(
            "torch", "warning", f"{version}, and its import takes longer than {TORCH_TIMEOUT_S} s", "Is the disk slow?"
        )
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(
            "torch",
            "problem",
            f"{version} cannot be imported: {last}",
            "Reinstall:  pip install --force-reinstall torch",
        )
    if _minor(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        return Check("torch", "warning", f"{version}; tested from {oldest}", "Update:  pip install -U torch")
    *_, gpus, kernel = result.stdout.splitlines()
    devices = f"{gpus if gpus != '0' else 'no'} CUDA device{'' if gpus == '1' else 's'}"
    return Check("torch", "ok", f"{version}, {devices}, {kernel} kernel for the CPU")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2] if part.isdigit())


def check_folder(folder: Path) -> Iterator[Check]:
    """Whether runs can be written there, safely and with room to spare."""
    place = _existing(folder)
    try:
        probe = tempfile.NamedTemporaryFile(dir=place, prefix=".sonde-doctor-")  # noqa: SIM115
    except OSError as error:
        remedy = "Choose another folder with --dir or SONDE_DIR."
        yield Check("write access", "problem", f"cannot write in {place}: {error.strerror}", remedy)
        return
    with probe:
        yield Check("write access", "ok", f"can write in {place}")
        yield _try("fsync", lambda: _check_fsync(probe.fileno()))
        yield _try("locks", lambda: _check_lock(probe.name))
    yield _check_space(place)


def _existing(folder: Path) -> Path:
    """The nearest folder that is there already: checking must not create anything that stays."""
    for path in (folder.absolute(), *folder.absolute().parents):
        if path.exists():
            return path
    return Path.cwd()


def _try(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except OSError as error:
        return Check(
            name, "problem", f"fails: {error.strerror or error}", "Keep runs on a local disk: --dir or SONDE_DIR."
        )


def _check_fsync(descriptor: int) -> Check:
    os.write(descriptor, b"x" * 30_000)
    started = time.perf_counter()
    os.fsync(descriptor)
    seconds = time.perf_counter() - started
    if seconds > SLOW_FSYNC_S:
        remedy = "Recording does not wait for it; a local disk loses less in a power cut."
        return Check("fsync", "warning", f"works, and takes {1000 * seconds:.0f} ms", remedy)
    return Check("fsync", "ok", f"{1000 * seconds:.1f} ms")


def _check_lock(name: str) -> Check:
    try:
        import fcntl
    except ImportError:
        return Check("locks", "warning", "this system has no flock", "Do not resume one run from two processes.")
    with Path(name).open("rb") as first, Path(name).open("rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Check("locks", "ok", "flock keeps a second writer out")
    remedy = "Two processes could write to one run: keep runs on a local disk with --dir or SONDE_DIR."
    return Check("locks", "warning", "flock lets two writers in", remedy)


def _check_space(place: Path) -> Check:
    free = shutil.disk_usage(place).free
    level: Level = "problem" if free < NO_SPACE else "warning" if free < LITTLE_SPACE else "ok"
    remedy = "" if level == "ok" else "Free some, or choose another folder with --dir or SONDE_DIR."
    return Check("free space", level, size(free), remedy)


def check_clock() -> Check:
    """A clock that is years off spoils ages and names of runs; the data are ordered by step and do not suffer."""
    built = Path(__file__).stat().st_mtime
    if time.time() < built - 86400:
        return Check(
            "clock", "warning", f"it is {time.strftime('%Y-%m-%d')}, before sonde was installed", "Set the clock."
        )
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def check_gpu() -> Check:
    """Whether the driver's management library answers."""
    try:
        import pynvml
    except ImportError:
        return Check(
            "GPU metrics", "note", "nvidia-ml-py is not installed", "For GPU metrics:  pip install 'sonde[gpu]'"
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Check(
            "GPU metrics", "note", f"no NVIDIA GPU answers ({error})", "Nothing to do on a machine without one."
        )
    try:
        return Check("GPU metrics", "ok", f"NVML sees {pynvml.nvmlDeviceGetCount()} GPU(s)")
    except pynvml.NVMLError as error:
        return Check("GPU metrics", "warning", f"NVML cannot count GPUs: {error}", "Check the driver with nvidia-smi.")
    finally:
        pynvml.nvmlShutdown()


def _show(checks: list[Check]) -> None:
    from rich.text import Text

    from sonde.show.term.console import is_ascii, make_console
    from sonde.show.term.table import Column, table

    console = make_console()
    marks = {"ok": "ok", "note": "-", "warning": "!", "problem": "x"}
    if not is_ascii(console):
        marks = {"ok": "✓", "note": "·", "warning": "!", "problem": "✗"}
    styles = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "bold red"}
    rows = [(Text(marks[c.level], style=styles[c.level]), c.name, c.found, c.remedy) for c in checks]
    columns = [Column(""), Column("check"), Column("found", wrap=True), Column("what to do", wrap=True)]
    console.print(table(columns, rows))
    num_problems = sum(check.level == "problem" for check in checks)
    console.print(
        f"\n{num_problems} problem{'' if num_problems == 1 else 's'} would break recording."
        if num_problems
        else "\nRecording will work here."
    )
