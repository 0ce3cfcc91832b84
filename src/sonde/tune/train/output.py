"""The folder a training writes to: what lies there already is gone on from, put away when told so, or left alone."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sonde.errors import UsageError
from sonde.read.run.checkpoints import Checkpoint, list_checkpoints
from sonde.read.run.link import linked_run
from sonde.read.run.manifest import parse_manifest
from sonde.schema.layout import RUN_FILE
from sonde.tune.checkpoint.storage import LocalStorage

FINAL_FOLDER: Final = "final"
_MUST_AGREE: Final = {
    "model": ("name", "architecture", "options", "class"),
    "method": ("name", "r", "alpha", "target_modules", "num_virtual_tokens"),
}
"""What a checkpoint can be put back into only if it is as it was."""


def open_output(folder: Path, *, resume: bool, overwrite: bool) -> list[Checkpoint]:
    """The checkpoints to go on from, oldest first; the folder is there and can be written to.

    Checkpoints of two trainings in one folder would be taken for those of one: `resume` goes on from the newest.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"output_dir {folder} cannot be made: {error.strerror or error}. Give another output_dir."
        ) from None
    found = list_checkpoints(folder)
    if resume:
        return [checkpoint for checkpoint in found if not checkpoint.problem]
    if found and not overwrite:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found[-6:])
        raise UsageError(
            f"{folder} holds checkpoints of another training (at {steps}). Go on from the newest with "
            "resume=True (--resume), give another output_dir, or have them deleted with overwrite=True (--overwrite)."
        )
    storage = LocalStorage(folder)
    for checkpoint in found:
        storage.delete_checkpoint(checkpoint.id)
    if found and (folder / FINAL_FOLDER).is_dir():
        shutil.rmtree(folder / FINAL_FOLDER)
    return []


def check_same(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse to go on with another model or method; gives what the run was told when it began.

    Found out later, a finished run would already have been opened again, and end as a crash.
    """
    run = linked_run(folder)
    if run is None:
        return {}
    before = dict(parse_manifest((run / RUN_FILE).read_bytes(), where=str(run)).config)
    for part, keys in _MUST_AGREE.items():
        was, now = before.get(part), config.get(part)
        if not isinstance(was, Mapping) or not isinstance(now, Mapping):
            continue
        for key in keys:
            if key in was and was[key] != now.get(key):
                raise UsageError(
                    f"the checkpoints in {folder} were made with {part}.{key} = {was[key]!r}, and this is "
                    f"{now.get(key)!r}. Go on as it was, or give another output_dir."
                )
    return before
