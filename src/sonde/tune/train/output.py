"""The output folder of a training: existing checkpoints are resumed from, deleted on request, or left alone."""

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
MERGED_FOLDER: Final = "merged"
_MUST_AGREE: Final = {
    "model": ("name", "architecture", "options", "class"),
    "method": ("name", "r", "alpha", "target_modules", "num_virtual_tokens"),
}
"""Settings that must not change between a checkpoint and a resumed training."""


def open_output(folder: Path, *, resume: bool, overwrite: bool) -> list[Checkpoint]:
    """The checkpoints to resume from, oldest first; creates the folder and checks that it is writable.

    Checkpoints of two trainings in one folder would look like those of one: `resume` continues from the newest.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot create output_dir {folder}: {error.strerror or error}. Choose another output_dir."
        ) from None
    found = list_checkpoints(folder)
    if resume:
        return [checkpoint for checkpoint in found if not checkpoint.problem]
    if found and not overwrite:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found[-6:])
        raise UsageError(
            f"{folder} contains checkpoints of an earlier training (at {steps}). Resume from the newest with "
            "resume=True, choose another output_dir, or delete them with overwrite=True."
        )
    storage = LocalStorage(folder)
    for checkpoint in found:
        storage.delete_checkpoint(checkpoint.id)
    for saved in (FINAL_FOLDER, MERGED_FOLDER):
        if found and (folder / saved).is_dir():
            shutil.rmtree(folder / saved)
    return []


def check_same(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse to resume with another model or method; returns the settings with which the run started.

    If this were found later, a finished run would already have been reopened, and would end as crashed.
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
                    f"the checkpoints in {folder} were saved with {part}.{key} = {was[key]!r}, but it is now "
                    f"{now.get(key)!r}. Set it back to resume, or choose another output_dir."
                )
    return before
