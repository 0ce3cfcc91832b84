"""Storage of checkpoints: `StorageBackend` is the interface, `LocalStorage` a folder on this machine."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from sonde.errors import CorruptError, MissingPackageError, UsageError
from sonde.read.run.checkpoints import Checkpoint, list_checkpoints, read_checkpoint_manifest, verify_checkpoint
from sonde.read.run.folder import open_inside
from sonde.schema.checkpoints import STATE_FILE, Manifest
from sonde.write.checkpoints import FileWriter, delete_checkpoint, locked, write_checkpoint
from sonde.write.folder import absolute

_MAX_STATE_BYTES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Payload:
    """A complete checkpoint: tensors by file (`model`, `optimizer`, …) and name, the rest as JSON, files for others."""

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    """JSON files that other programs look for: `trainer_state.json`. They are not read back."""


class StorageBackend(ABC):
    """Stores checkpoints under an id, completely or not at all."""

    @abstractmethod
    def save_checkpoint(self, checkpoint: Payload, metadata: Mapping[str, Any]) -> Checkpoint:
        """Store it. `metadata` has step, metrics and details."""

    @abstractmethod
    def load_checkpoint(self, checkpoint_id: str) -> Payload:
        """Load it as it was, or raise CorruptError."""

    @abstractmethod
    def list_checkpoints(self) -> list[Checkpoint]:
        """The stored checkpoints, by step."""

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        raise UsageError(f"{type(self).__name__} cannot delete checkpoints; implement delete_checkpoint().")

    def verify_checkpoint(self, checkpoint_id: str) -> list[str]:
        """Its problems, in words; empty if there are none."""
        try:
            self.load_checkpoint(checkpoint_id)
        except CorruptError as error:
            return [str(error)]
        return []


class LocalStorage(StorageBackend):
    """A folder: safetensors and JSON, hashed, atomic; one process at a time changes it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = absolute(folder)
        _safetensors()

    def save_checkpoint(self, checkpoint: Payload, metadata: Mapping[str, Any]) -> Checkpoint:
        manifest = Manifest(
            step=int(metadata["step"]),
            time=float(metadata.get("time", time.time())),
            metrics=metadata.get("metrics", {}),
            details=metadata.get("details", {}),
        )
        files: dict[str, FileWriter] = {
            f"{stem}.safetensors": _tensor_writer(tensors) for stem, tensors in checkpoint.tensors.items()
        }
        for name, content in {**checkpoint.documents, STATE_FILE: checkpoint.state}.items():
            files[name] = _text_writer(content)
        with locked(self.folder):
            path, manifest = write_checkpoint(self.folder, manifest, files)
        return Checkpoint(path, manifest.step, manifest.time, manifest.metrics, manifest.num_bytes, manifest.details)

    def load_checkpoint(self, checkpoint_id: str) -> Payload:
        path = self._path(checkpoint_id)
        problems = verify_checkpoint(path)
        if problems:
            raise CorruptError(
                f"{path} is damaged and was not loaded: {'; '.join(problems)}.{self._advice(checkpoint_id)}"
            )
        manifest = read_checkpoint_manifest(path)
        tensors = {
            name.removesuffix(".safetensors"): _read_tensors(path / name)
            for name in manifest.files
            if name.endswith(".safetensors")
        }
        return Payload(tensors, _read_state(path))

    def list_checkpoints(self) -> list[Checkpoint]:
        return list_checkpoints(self.folder)

    def delete_checkpoint(self, checkpoint_id: str) -> None:
        path = self._path(checkpoint_id)
        with locked(self.folder):
            if path.is_dir():
                delete_checkpoint(path)

    def verify_checkpoint(self, checkpoint_id: str) -> list[str]:
        return verify_checkpoint(self._path(checkpoint_id))

    def _path(self, checkpoint_id: str) -> Path:
        if Path(checkpoint_id).name != checkpoint_id:
            raise UsageError(
                f'a checkpoint is named after its folder, such as "step-000000500"; got {checkpoint_id!r}.'
            )
        return self.folder / checkpoint_id

    def _advice(self, damaged: str) -> str:
        """The next one to try: the newest intact one."""
        for other in reversed(self.list_checkpoints()):
            if other.id != damaged and not other.problem and not verify_checkpoint(other.path):
                return f" The newest intact one is {other.id}: restore({other.step})."
        return " No other one is intact."


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingPackageError("safetensors", "tune", "Saving checkpoints") from None
    return safetensors


def _tensor_writer(tensors: dict[str, Tensor]) -> FileWriter:
    def write(path: Path) -> None:
        safetensors = _safetensors()
        ready = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        try:
            safetensors.torch.save_file(_apart(ready), path, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:  # a full disk is not an OSError here, and must not end training
            raise OSError(f"{path.name}: {error}") from error
        except (KeyError, ValueError) as error:
            dtypes = sorted({str(tensor.dtype) for tensor in ready.values()})
            raise UsageError(
                f"safetensors cannot store these tensors ({error}); their dtypes are {', '.join(dtypes)}."
            ) from error

    return write


def _text_writer(content: Any) -> FileWriter:
    data = json.dumps(content, allow_nan=False).encode("utf-8", "surrogatepass")

    def write(path: Path) -> None:
        path.write_bytes(data)

    return write


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors rejects tensors that share memory: the second of two is written as a copy."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_whole = storage.nbytes() == tensor.numel() * tensor.element_size()
        if tensor.numel() and (storage.data_ptr() in seen or not is_whole):
            tensor = tensor.clone(memory_format=_contiguous())
        seen.add(tensor.untyped_storage().data_ptr())
        apart[name] = tensor
    return apart


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Copies: a tensor in a mapped file would break with it."""
    safetensors = _safetensors()
    with open_inside(path.parent, path.name):  # a plain file inside the folder, not a link to elsewhere
        pass
    try:
        return {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CorruptError(f"{path} is not a safetensors file ({error}).") from error


def _read_state(path: Path) -> dict[str, Any]:
    with open_inside(path, STATE_FILE) as file:
        data = file.read(_MAX_STATE_BYTES + 1)
    if len(data) > _MAX_STATE_BYTES:
        raise CorruptError(f"{path / STATE_FILE} is larger than {_MAX_STATE_BYTES >> 30} GiB; it is not read.")
    try:
        state = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path / STATE_FILE} is not JSON ({error}).") from error
    if not isinstance(state, dict):
        raise CorruptError(f"{path / STATE_FILE} does not contain a state.")
    return state
