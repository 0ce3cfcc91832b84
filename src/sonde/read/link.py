"""Which run a folder of checkpoints belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from sonde.schema.checkpoints import CHECKPOINTS_FOLDER, LINK_FILE
from sonde.schema.layout import RUN_FILE

_MAX_BYTES: Final = 1 << 16


def linked_run(folder: Path) -> Path | None:
    """The run of a folder of checkpoints: the folder itself, the one above it, or the one its link names."""
    for place in (folder, folder.parent if folder.name == CHECKPOINTS_FOLDER else folder):
        if (place / RUN_FILE).is_file():
            return place
    try:
        with (folder / LINK_FILE).open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        candidates = [folder / str(content["run"]), Path(str(content["absolute"]))]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return next((path.resolve() for path in candidates if (path / RUN_FILE).is_file()), None)
