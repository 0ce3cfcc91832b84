"""Checkpoints on disk: listing and verification. Opens no tensors and trusts no file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from sonde.errors import CorruptError, SondeError
from sonde.read.run.catalog import read_rows
from sonde.read.run.folder import open_inside
from sonde.read.run.log import list_folder
from sonde.read.run.schemas import schema_of
from sonde.read.run.state import RunState
from sonde.read.run.tables import checkpoint_table
from sonde.schema.checkpoints import (
    CHECKPOINTS_FOLDER,
    MANIFEST_FILE,
    RUN_STEP,
    Manifest,
    decode_manifest,
    parse_folder,
)

_MAX_MANIFEST_BYTES: Final = 16 << 20
_BLOCK: Final = 1 << 20
ELSEWHERE: Final = "in another folder, which may have changed"
_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_TABLE: Final = pa.schema(
    [
        *schema_of("step:int64 time:double path:string"),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        *schema_of("num_bytes:int64 problem:string"),
    ]
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint; `problem` says why it cannot be used, according to its manifest."""

    path: Path
    step: int
    time: float
    metrics: Mapping[str, float]
    num_bytes: int
    details: Mapping[str, Any]
    problem: str = ""

    @property
    def id(self) -> str:
        """The name of its folder."""
        return self.path.name


def checkpoints_folder(path: Path) -> Path:
    """The checkpoints folder of a run, or the folder itself if it holds checkpoints."""
    inner = path / CHECKPOINTS_FOLDER
    return inner if inner.is_dir() else path


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """All visible checkpoints by step; if a step was saved more than once, the newest copy."""
    newest: dict[int, tuple[int, str]] = {}
    for name in list_folder(folder):
        step, copy = parse_folder(name) or (-1, 0)
        if step >= 0 and copy > newest.get(step, (0, ""))[0] and not (folder / name).is_symlink():
            newest[step] = copy, name
    found = [_checkpoint(folder / name, step) for step, (_, name) in sorted(newest.items())]
    return [
        checkpoint for checkpoint in found if not checkpoint.problem or checkpoint.path.is_dir()
    ]  # deleted meanwhile


def run_checkpoints(state: RunState) -> list[Checkpoint]:
    """Checkpoints in a run's folder, and those it recorded elsewhere, which are not opened: a run is not trusted."""
    abandoned = abandoned_checkpoints(state)
    inside = [c for c in list_checkpoints(state.run / CHECKPOINTS_FOLDER) if c.path not in abandoned]
    outside: dict[str, Checkpoint] = {}
    for row in checkpoint_table(state).to_pylist():
        path = Path(row["path"])
        if path.is_absolute():  # checkpoints of other trainers have other names
            outside[str(path)] = _elsewhere(path, row)
    return sorted([*inside, *outside.values()], key=lambda checkpoint: checkpoint.step)


def abandoned_checkpoints(state: RunState) -> set[Path]:
    """Folders of checkpoints saved by another attempt. A folder that was reused holds what was saved to it last."""
    last = {str(row[3]): row[0] for row in read_rows(state.run, "checkpoints", is_live=state.is_held)}
    shown = set(checkpoint_table(state)["id"].to_pylist())
    return {state.run / path for path, id in last.items() if id not in shown}


def _elsewhere(path: Path, row: Mapping[str, Any]) -> Checkpoint:
    try:
        metrics = {str(name): float(value) for name, value in json.loads(row["metrics"]).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        metrics = {}
    num_bytes = int(metrics.pop("num_bytes", 0))
    metrics.pop(RUN_STEP, None)
    return Checkpoint(path, row["step"], row["time"], metrics, num_bytes, {}, ELSEWHERE)


def read_checkpoint_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint; the error for an invalid one says what was found instead."""
    where = f"{path.name}/{MANIFEST_FILE}"
    try:
        with open_inside(path, MANIFEST_FILE) as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise CorruptError(f"{path} is not a checkpoint: it has no {MANIFEST_FILE}.{_pickle_remark(path)}") from None
    if len(data) > _MAX_MANIFEST_BYTES:
        raise CorruptError(f"{where} is larger than {_MAX_MANIFEST_BYTES >> 20} MiB, so it is not read.")
    return decode_manifest(data, where)


def verify_checkpoint(path: Path) -> list[str]:
    """Read every byte of a checkpoint and describe each problem; empty if it is intact."""
    try:
        manifest = read_checkpoint_manifest(path)
    except (SondeError, OSError) as error:
        return [str(error)]
    return [problem for name in manifest.files if (problem := _problem(path, name, manifest))]


def checkpoint_list_table(found: list[Checkpoint]) -> pa.Table:
    """Table (step, time, path, metrics, num_bytes, problem) of checkpoints, oldest first."""
    rows = [(c.step, c.time, str(c.path), list(c.metrics.items()), c.num_bytes, c.problem) for c in found]
    return pa.Table.from_pylist([dict(zip(_TABLE.names, row, strict=True)) for row in rows], schema=_TABLE)


def _checkpoint(path: Path, step: int) -> Checkpoint:
    try:
        manifest = read_checkpoint_manifest(path)
        if manifest.step != step:
            raise CorruptError(f"{path.name}/{MANIFEST_FILE} says step {manifest.step}.")
    except (SondeError, OSError) as error:
        return Checkpoint(path, step, 0.0, {}, 0, {}, str(error))
    missing = [name for name in manifest.files if not (path / name).is_file()]
    problem = f"{', '.join(missing)} missing" if missing else ""
    return Checkpoint(path, step, manifest.time, manifest.metrics, manifest.num_bytes, manifest.details, problem)


def _problem(path: Path, name: str, manifest: Manifest) -> str:
    stored = manifest.files[name]
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with open_inside(path, name) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                num_bytes += len(block)
    except FileNotFoundError:
        return f"{name} is missing"
    except (SondeError, OSError) as error:
        return str(error)
    if num_bytes != stored.num_bytes:
        return f"{name} has {num_bytes:,} bytes instead of {stored.num_bytes:,}"
    if digest.hexdigest() != stored.sha256:
        return f"{name} does not match its sha256"
    return ""


def _pickle_remark(path: Path) -> str:
    pickles = sorted(name for name in list_folder(path) if name.endswith(_PICKLES)) if path.is_dir() else []
    if not pickles:
        return ""
    return (
        f" {', '.join(pickles[:3])} may be a pickle, which can run code when opened, so sonde does not open it. "
        "If you trust it, convert it:  safetensors.torch.save_file(torch.load(file, weights_only=True), ...)"
    )
