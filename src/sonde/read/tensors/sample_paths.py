"""Paths of the tensors of a step: its snapshot, or a checkpoint of its weights. Includes only existing paths."""

from __future__ import annotations

from sonde.read.run.checkpoints import ELSEWHERE, run_checkpoints
from sonde.read.run.state import RunState
from sonde.read.tensors.stores import FolderTensorStore, open_tensor_store, upload_state


def sample_paths(state: RunState) -> dict[int, str]:
    """Paths by step. A snapshot that is only in a repository is named by the repository's URL, which is not opened."""
    return {**_checkpoints(state), **_snapshots(state)}


def _checkpoints(state: RunState) -> dict[int, str]:
    found = run_checkpoints(state)
    return {c.step: str(c.path) for c in found if c.problem in ("", ELSEWHERE) and c.path.exists()}


def _snapshots(state: RunState) -> dict[int, str]:
    run, upload, store = state.run, upload_state(state.run), open_tensor_store(state.run, attempt=state.view)
    far = "" if upload is None else (upload.url if "://" in upload.url else str(run / upload.url))
    places = [store.place(step) for step in store.steps]
    here = {place.step: FolderTensorStore(run, attempt=place.attempt).path(place.step) for place in places}
    return {step: str(path) if path.exists() else far for step, path in here.items()}
