"""Where the tensors of a step are: its snapshot, else a checkpoint of its weights. Names only what exists now."""

from __future__ import annotations

from pathlib import Path

from sonde.read.run.checkpoints import ELSEWHERE, run_checkpoints
from sonde.read.run.state import RunState
from sonde.read.tensors.lake import FolderLake, upload_state


def sample_paths(state: RunState) -> dict[int, str]:
    """By step. A snapshot that is only in a repository is named by the repository's address, which is not asked."""
    return {**_checkpoints(state), **_snapshots(state.run)}


def _checkpoints(state: RunState) -> dict[int, str]:
    found = run_checkpoints(state)
    return {c.step: str(c.path) for c in found if c.problem in ("", ELSEWHERE) and c.path.exists()}


def _snapshots(run: Path) -> dict[int, str]:
    state = upload_state(run)
    far = dict.fromkeys(state.uploaded, _address(run, state.url)) if state is not None else {}
    lake = FolderLake(run)
    return {**far, **{step: str(lake.path(step)) for step in lake.steps}}


def _address(run: Path, url: str) -> str:
    return url if "://" in url else str(run / url)
