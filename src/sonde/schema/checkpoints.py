"""The format of a checkpoint on disk: the names of its folder and files, and its manifest. No I/O.

checkpoints/step-000000500/manifest.json      step, time, metrics, and size and sha256 of every other file
                           model.safetensors  weights and buffers
                           optimizer.safetensors, state.safetensors, state.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sonde.errors import CorruptError, FormatError
from sonde.schema.records import check_document, sign_document, to_json

CHECKPOINT_FORMAT: Final = 1
CHECKPOINTS_FOLDER: Final = "checkpoints"
MANIFEST_FILE: Final = "manifest.json"
STATE_FILE: Final = "state.json"
LINK_FILE: Final = "sonde.json"
"""In a folder of checkpoints outside a run: the run they belong to."""
RUN_STEP: Final = "run_step"
"""Among the metrics of a checkpoint in the catalog: the next step of the run, if its number differs."""
HIDDEN: Final = "."
"""Folders with this prefix are being written or deleted: no one reads them."""

_FOLDER: Final = re.compile(r"step-(\d{9,18})(?:-(\d{1,6}))?")
_FILE: Final = re.compile(r"[A-Za-z0-9_][\w.+-]{0,120}\.(safetensors|json)", re.ASCII)
_SIGNED: Final = re.compile(rb', "crc32": "[0-9a-f]{8}"\}\n\Z')
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint, as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    time: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    """Other facts: versions, and why it was saved."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def folder_of_step(step: int, copy: int = 1) -> str:
    """A step saved again gets a separate folder, so that a complete one always exists.

    >>> folder_of_step(500), folder_of_step(500, 2)
    ('step-000000500', 'step-000000500-2')
    """
    return f"step-{step:09d}" if copy == 1 else f"step-{step:09d}-{copy}"


def parse_folder(name: str) -> tuple[int, int] | None:
    """Step and copy, or None for a folder that is not a checkpoint.

    >>> parse_folder("step-000000500-2"), parse_folder("step-1")
    ((500, 2), None)
    """
    match = _FOLDER.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))


def is_file_name(name: str) -> bool:
    """Whether a manifest may name such a file: one of ours, and in the checkpoint's own folder.

    >>> is_file_name("model.safetensors"), is_file_name("../model.safetensors"), is_file_name("model.pt")
    (True, False, False)
    """
    return _FILE.fullmatch(name) is not None


def encode_manifest(manifest: Manifest) -> bytes:
    """The file, with a checksum of itself."""
    content = {
        "format": CHECKPOINT_FORMAT,
        "step": manifest.step,
        "time": manifest.time,
        "metrics": dict(manifest.metrics),
        "files": {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in manifest.files.items()},
        "details": dict(manifest.details),
    }
    return sign_document(to_json(content)).encode()


def decode_manifest(data: bytes, where: str) -> Manifest:
    """The content of the file, or CorruptError; nothing in it is trusted."""
    if not _SIGNED.search(data) or not check_document(data):
        raise CorruptError(f"{where} does not match its checksum.")
    try:
        content = json.loads(data)
        if not isinstance(content["format"], int):
            raise TypeError("it has no format")
        if content["format"] > CHECKPOINT_FORMAT:
            raise FormatError(
                f"{where} has format {content['format']}; this version of sonde reads up to {CHECKPOINT_FORMAT}."
            )
        files = {name: _file(name, entry) for name, entry in content["files"].items()}
        return Manifest(
            step=int(content["step"]),
            time=float(content["time"]),
            metrics={str(name): float(value) for name, value in content["metrics"].items()},
            files=files,
            details=dict(content["details"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise CorruptError(f"{where} is not a checkpoint's manifest ({error!r}).") from error


def _file(name: str, entry: Mapping[str, Any]) -> StoredFile:
    if not is_file_name(name):
        raise ValueError(f"{name!r} is not a valid checkpoint file name")
    file = StoredFile(int(entry["bytes"]), str(entry["sha256"]))
    if file.num_bytes < 0 or not _SHA256.fullmatch(file.sha256):
        raise ValueError(f"{name!r} has no size and hash")
    return file
