"""`sonde doctor`: describe the installation, check that recording works, and suggest a fix where it does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import typer

from sonde.cli.installation import describe_installation, package_version, print_installation, print_settings
from sonde.cli.options import Dir, Json
from sonde.cli.output import print_json
from sonde.distribution import DISTRIBUTION, EXTRAS, OTHER_DISTRIBUTION, extra_packages, install_command
from sonde.distribution import version as sonde_version
from sonde.show.term.number import counted, size

if TYPE_CHECKING:
    from sonde.config import Settings

OLDEST_PYTHON: Final = (3, 11)
OLDEST_TORCH: Final = (2, 12)
"""The last four minor versions are supported."""
LITTLE_SPACE: Final = 1 << 30
NO_SPACE: Final = 64 << 20
SLOW_FSYNC_S: Final = 0.1
TORCH_TIMEOUT_S: Final = 120

Level = Literal["ok", "note", "warning", "problem"]


class Check(NamedTuple):
    """One check and its result. A "problem" would break recording; a "note" is for information only."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def doctor(
    settings: Annotated[bool, typer.Option("--settings", help="List every setting with its value and origin.")] = False,
    checks: Annotated[
        bool, typer.Option("--checks/--no-checks", help="Run the checks, or only describe the installation.")
    ] = True,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Check that recording works on this machine.

    Shows the version, the folder of runs and its size, checks versions, disk, locks, clock and GPU, and lists every
    extra with what it adds. The exit code is 1 if a problem would break recording.

    \b
    Examples:
      sonde doctor
      sonde doctor --dir /scratch/runs --json
      sonde doctor --settings
      SONDE_BUDGET=0.05 sonde doctor --settings --json
    """
    if settings:
        print_settings(_load(dir).explain(), as_json=json)
        return
    results = list(run_checks(dir)) if checks else []
    facts = describe_installation(_load_valid(dir) if checks else _load(dir))
    if json:
        print_json({**facts, "checks": [check._asdict() for check in results]} if checks else facts)
    else:
        print_installation(facts)
        _show(results)
    raise typer.Exit(int(any(check.level == "problem" for check in results)))


def _load(dir: Path | None) -> Settings:
    from sonde.config import Settings

    return Settings.load() if dir is None else Settings.load(dir=dir)


def _load_valid(dir: Path | None) -> Settings | None:
    """The settings; None if one is invalid, which is a separate check."""
    from sonde.errors import SettingsError

    try:
        return _load(dir)
    except SettingsError:
        return None


def run_checks(dir: Path | None) -> Iterator[Check]:
    yield check_distribution()
    yield check_python()
    yield check_torch()
    from sonde.cli.options import runs_dir
    from sonde.errors import SettingsError

    try:
        folder = runs_dir(dir)
    except SettingsError as error:
        yield Check("settings", "problem", str(error), "Correct the setting; `sonde doctor --settings` lists them all.")
        return
    yield Check("settings", "ok", f"runs are stored in {folder.absolute()}")
    yield from check_folder(folder)
    yield check_clock()
    yield from check_gpu()
    yield from check_extras()


def check_distribution() -> Check:
    """Check that no other installed package has the module and the command of this one."""
    other = package_version(OTHER_DISTRIBUTION)
    if other is None:
        return Check(DISTRIBUTION, "ok", sonde_version())
    return Check(
        DISTRIBUTION,
        "warning",
        f"{sonde_version()}, but {OTHER_DISTRIBUTION} {other} is installed too: a package with the same module and "
        "command, so that parts of one may have overwritten the other",
        f"pip uninstall {OTHER_DISTRIBUTION}  and then  pip install --force-reinstall --no-deps {DISTRIBUTION}",
    )


def check_extras() -> Iterator[Check]:
    """List every extra with what it adds."""
    for extra, packages in extra_packages().items():
        missing = [package for package in packages if package_version(package) is None]
        if missing:
            found = f"{EXTRAS[extra]}: needs {', '.join(missing)}"
            yield Check(f"extra {extra}", "note", found, install_command(extra))
        else:
            yield Check(f"extra {extra}", "ok", f"{EXTRAS[extra]}: installed")


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return Check("python", "problem", version, f"Install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer.")
    return Check("python", "ok", version)


def check_torch() -> Check:
    """Check in a separate process that torch is installed, recent enough and can be imported."""
    version = package_version("torch")
    if version is None:
        return Check("torch", "note", "not installed", "Needed only for recording:  pip install torch")
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
            "torch",
            "warning",
            f"{version}; importing it takes more than {TORCH_TIMEOUT_S} s",
            "Check whether the disk is slow.",
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
        return Check("torch", "warning", f"{version}; supported from {oldest} on", "Update:  pip install -U torch")
    *_, gpus, kernel = result.stdout.splitlines()
    devices = f"{gpus if gpus != '0' else 'no'} CUDA device{'' if gpus == '1' else 's'}"
    return Check("torch", "ok", f"{version}, {devices}, {kernel} kernel for the CPU")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2] if part.isdigit())


def check_folder(folder: Path) -> Iterator[Check]:
    """Check that runs can be written there safely and that there is enough space."""
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
    """The nearest existing folder: a check must not create one."""
    for path in (folder.absolute(), *folder.absolute().parents):
        if path.exists():
            return path
    return Path.cwd()


def _try(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except OSError as error:
        return Check(
            name, "problem", f"failed: {error.strerror or error}", "Keep runs on a local disk with --dir or SONDE_DIR."
        )


def _check_fsync(descriptor: int) -> Check:
    os.write(descriptor, b"x" * 30_000)
    started = time.perf_counter()
    os.fsync(descriptor)
    seconds = time.perf_counter() - started
    if seconds > SLOW_FSYNC_S:
        remedy = "Training does not wait for it, but on a local disk a power failure would lose less."
        return Check("fsync", "warning", f"works, but takes {1000 * seconds:.0f} ms", remedy)
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
    return Check("locks", "warning", "flock does not keep a second writer out", remedy)


def _check_space(place: Path) -> Check:
    free = shutil.disk_usage(place).free
    level: Level = "problem" if free < NO_SPACE else "warning" if free < LITTLE_SPACE else "ok"
    remedy = "" if level == "ok" else "Free some space, or choose another folder with --dir or SONDE_DIR."
    return Check("free space", level, size(free), remedy)


def check_clock() -> Check:
    """Check the clock: if it is far off, ages and names of runs are wrong. The data is ordered by step anyway."""
    built = Path(__file__).stat().st_mtime
    if time.time() < built - 86400:
        return Check(
            "clock", "warning", f"shows {time.strftime('%Y-%m-%d')}, before sonde was installed", "Set the clock."
        )
    return Check("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S %Z"))


def check_gpu() -> Iterator[Check]:
    """Check that the driver's management library responds, if the extra `gpu` is installed."""
    try:
        import pynvml
    except ImportError:
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        remedy = "On a machine without a GPU this is expected."
        yield Check("GPU metrics", "note", f"no NVIDIA GPU responds ({error})", remedy)
        return
    try:
        yield Check("GPU metrics", "ok", f"NVML sees {counted(pynvml.nvmlDeviceGetCount(), 'GPU')}")
    except pynvml.NVMLError as error:
        yield Check("GPU metrics", "warning", f"NVML cannot count GPUs: {error}", "Check the driver with nvidia-smi.")
    finally:
        pynvml.nvmlShutdown()


def _show(checks: list[Check]) -> None:
    from rich.text import Text

    from sonde.show.term.console import is_ascii, make_console
    from sonde.show.term.table import Column, table

    if not checks:
        return
    console = make_console()
    console.print()
    marks = {"ok": "ok", "note": "-", "warning": "!", "problem": "x"}
    if not is_ascii(console):
        marks = {"ok": "✓", "note": "·", "warning": "!", "problem": "✗"}
    styles = {"ok": "green", "note": "dim", "warning": "yellow", "problem": "bold red"}
    rows = [(Text(marks[c.level], style=styles[c.level]), c.name, c.found, c.remedy) for c in checks]
    columns = [Column(""), Column("check"), Column("result", wrap=True), Column("what to do", wrap=True)]
    console.print(table(columns, rows))
    num_problems = sum(check.level == "problem" for check in checks)
    console.print(
        f"\n{num_problems} problem{'' if num_problems == 1 else 's'} would break recording."
        if num_problems
        else "\nRecording will work here."
    )
