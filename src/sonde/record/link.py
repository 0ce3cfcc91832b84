"""A small file in a folder of checkpoints that says which run recorded them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from sonde.schema.checkpoints import CHECKPOINTS_FOLDER
from sonde.schema.layout import RUN_FILE

LINK_FILE: Final = "sonde.json"
_MAX_BYTES: Final = 1 << 16


def write_link(folder: Path, run: Path) -> None:
    """Relative, so that both may be moved together."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LINK_FILE
    tmp = path.with_suffix(".tmp")
    content = {"run": os.path.relpath(run.resolve(), folder.resolve()), "absolute": str(run.resolve())}
    tmp.write_text(json.dumps(content), encoding="utf-8")
    tmp.replace(path)


def linked_run(folder: Path) -> Path | None:
    """The run of a folder of checkpoints: the folder itself, the one above it, or the one its link names."""
    for place in (folder, folder.parent if folder.name == CHECKPOINTS_FOLDER else folder):
        if (place / RUN_FILE).is_file():
            return place
    try:
        with (folder / LINK_FILE).open("rb") as file:
            content = json.loads(file.read(_MAX_BYTES))
        candidates = [folder / str(content["run"]), Path(str(content["absolute"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return next((path.resolve() for path in candidates if (path / RUN_FILE).is_file()), None)
