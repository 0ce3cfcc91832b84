"""The progress of uploading a run's snapshots: the file that the uploader keeps next to the spool. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sonde.errors import CorruptError
from sonde.schema.records import check_document, sign_document
from sonde.schema.snapshots.tensors import SnapshotKey, hidden_folder, parent_name

UPLOAD_FILE: Final = "upload.json"
UPLOAD_LOCK: Final = "uploading"
"""A folder whose lock the one uploader of a run holds."""


@dataclass(slots=True)
class UploadState:
    """The known state of the store. Snapshots that are in the spool and not in `uploaded` are waiting."""

    url: str
    branch: str = "main"
    keeps_local: bool = True
    """Whether the local copy stays after the upload."""
    uploaded: dict[SnapshotKey, str] = field(default_factory=dict)
    """The commit of each snapshot."""
    last_error: str = ""
    """Why the last attempt failed; empty if it did not."""
    time: float = 0.0

    def steps(self, attempt: int = 0) -> list[int]:
        return sorted(key.step for key in self.uploaded if key.attempt == attempt)

    def waiting(self, local: Iterable[SnapshotKey]) -> list[SnapshotKey]:
        return sorted(key for key in local if key not in self.uploaded)

    def facts(self, local: Iterable[SnapshotKey]) -> dict[str, Any]:
        """A summary for people: run.json, `sonde snapshot --upload`."""
        return {
            "url": self.url,
            "waiting": len(self.waiting(local)),
            "uploaded": len(self.uploaded),
            "last_error": self.last_error,
        }

    def to_bytes(self) -> bytes:
        later = sorted({key.attempt for key in self.uploaded} - {0})
        content = {
            "url": self.url,
            "branch": self.branch,
            "keeps_local": self.keeps_local,
            "uploaded": self._commits(0),
            **({"uploaded_later": {str(attempt): self._commits(attempt) for attempt in later}} if later else {}),
            "last_error": self.last_error,
            "time": self.time,
        }
        return sign_document(json.dumps(content)).encode()

    def _commits(self, attempt: int) -> dict[str, str]:
        return {str(key.step): commit for key, commit in self.uploaded.items() if key.attempt == attempt}

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> UploadState:
        try:
            if not check_document(data):
                raise ValueError("its checksum does not match")
            content = json.loads(data)
            return cls(
                url=str(content["url"]),
                branch=str(content["branch"]),
                keeps_local=bool(content["keeps_local"]),
                uploaded=_parsed({0: content["uploaded"], **content.get("uploaded_later", {})}),
                last_error=str(content["last_error"]),
                time=float(content["time"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(
                f"{where} is damaged ({error}). Delete it: the uploader then asks the store which snapshots it has."
            ) from error


def _parsed(commits: Mapping[Any, Mapping[str, Any]]) -> dict[SnapshotKey, str]:
    return {
        SnapshotKey(int(attempt), int(step)): str(commit)
        for attempt, own in commits.items()
        for step, commit in own.items()
    }


def upload_file(run: Path, rank: int = 0) -> Path:
    return hidden_folder(run) / parent_name(rank) / UPLOAD_FILE
