"""The run that a folder of checkpoints belongs to, and the step of that run after a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sonde.errors import CorruptError
from sonde.read.run.folder import open_regular
from sonde.schema.checkpoints import CHECKPOINTS_FOLDER, LINK_FILE
from sonde.schema.layout import RUN_FILE

_MAX_BYTES: Final = 1 << 16


def linked_run(folder: Path) -> Path | None:
    """The run of a folder of checkpoints: the folder itself, its parent, or the target of its link."""
    for place in (folder, folder.parent if folder.name == CHECKPOINTS_FOLDER else folder):
        if (place / RUN_FILE).is_file():
            return place
    content = _link(folder)
    if "run" not in content or "absolute" not in content:
        return None
    candidates = [folder / str(content["run"]), Path(str(content["absolute"]))]
    return next((path.resolve() for path in candidates if (path / RUN_FILE).is_file()), None)


def linked_step(folder: Path) -> int | None:
    """The step of the run after this checkpoint; None if its link does not say."""
    step = _link(folder).get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and step >= 0 else None


def _link(folder: Path) -> dict[str, Any]:
    try:
        with open_regular(folder / LINK_FILE, str(folder / LINK_FILE)) as file:
            content = json.loads(file.read(_MAX_BYTES))
    except (OSError, CorruptError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
