"""The environment of a run: Python, machine, package versions, git revision. Imports none of the packages it names."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from sonde.distribution import DISTRIBUTION

PACKAGES: Final = (
    DISTRIBUTION, "torch", "numpy", "pyarrow", "transformers", "accelerate", "lightning", "pytorch-lightning", "peft",
    "trl", "datasets", "tokenizers", "deepspeed", "torchvision", "torchaudio", "triton", "bitsandbytes", "flash-attn",
    "xformers", "keras", "tensorflow", "jax", "jaxlib", "flax", "optax",
)  # fmt: skip
GIT_TIMEOUT_S: Final = 2.0


def describe_machine() -> dict[str, Any]:
    """The part that takes no time."""
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": f"{platform.system()}-{platform.release()}-{platform.machine()}",
        "hostname": socket.gethostname(),
        "num_cpus": os.cpu_count(),
    }


def working_directory() -> Path | None:
    """The working directory; None if that folder was deleted."""
    try:
        return Path.cwd()
    except OSError:
        return None


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter to a training run, read from their metadata."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_state(folder: Path, *, timeout_s: float = GIT_TIMEOUT_S) -> dict[str, Any] | None:
    """Revision, branch and whether files differ from it; None outside a repository. `dirty` is None if git was slow."""
    try:
        revision = _git(folder, timeout_s, "rev-parse", "HEAD")
        if not revision:
            return None
        branch = _git(folder, timeout_s, "rev-parse", "--abbrev-ref", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    try:
        changes = _git(folder, timeout_s, "status", "--porcelain", "--untracked-files=no")
        dirty = None if changes is None else bool(changes)
    except (OSError, subprocess.SubprocessError):
        dirty = None
    return {"revision": revision, "branch": None if branch == "HEAD" else branch, "dirty": dirty}


def _git(folder: Path, timeout_s: float, *arguments: str) -> str | None:
    """The output of git, or None if it fails. It takes no locks, never prompts, and runs no code of the repository."""
    finished = subprocess.run(
        ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", *arguments],
        cwd=folder,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=timeout_s,
        check=False,
    )
    return finished.stdout.decode("utf-8", "replace").strip() if finished.returncode == 0 else None
