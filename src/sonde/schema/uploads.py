"""How far the upload of a run's snapshots has come: the file the uploader keeps beside the spool. No I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sonde.errors import CorruptError
from sonde.schema.records import check_document, sign_document
from sonde.schema.tensors import group_name, hidden_folder

UPLOAD_FILE: Final = "upload.json"
UPLOAD_LOCK: Final = "uploading"
"""A folder whose lock the one uploader of a run holds."""


@dataclass(slots=True)
class UploadState:
    """What is known of the far side. Snapshots that are in the spool and not in `uploaded` wait."""

    url: str
    branch: str = "main"
    keeps_local: bool = True
    """Whether the local copy stays when the far side has it."""
    uploaded: dict[int, str] = field(default_factory=dict)
    """Commits by step."""
    last_error: str = ""
    """Why the last attempt failed; empty when it did not."""
    time: float = 0.0

    def waiting(self, local: Iterable[int]) -> list[int]:
        """Of the snapshots that are here, those that are not there."""
        return sorted(step for step in local if step not in self.uploaded)

    def facts(self, local: Iterable[int]) -> dict[str, Any]:
        """For people: run.json, `sonde info`, `sonde push`."""
        return {
            "url": self.url,
            "waiting": len(self.waiting(local)),
            "uploaded": len(self.uploaded),
            "last_error": self.last_error,
        }

    def to_bytes(self) -> bytes:
        content = {
            "url": self.url,
            "branch": self.branch,
            "keeps_local": self.keeps_local,
            "uploaded": {str(step): commit for step, commit in self.uploaded.items()},
            "last_error": self.last_error,
            "time": self.time,
        }
        return sign_document(json.dumps(content)).encode()

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
                uploaded={int(step): str(commit) for step, commit in content["uploaded"].items()},
                last_error=str(content["last_error"]),
                time=float(content["time"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptError(
                f"{where} is damaged ({error}). Remove it: the uploader asks the far side what it has."
            ) from error


def upload_file(run: Path, rank: int = 0) -> Path:
    return (hidden_folder(run) / group_name(0, rank)).parent / UPLOAD_FILE
