"""A small file in a folder of checkpoints that says which run recorded them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sonde.schema.checkpoints import LINK_FILE


def write_link(folder: Path, run: Path) -> None:
    """Relative, so that both may be moved together."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LINK_FILE
    tmp = path.with_suffix(".tmp")
    content = {"run": os.path.relpath(run.resolve(), folder.resolve()), "absolute": str(run.resolve())}
    tmp.write_text(json.dumps(content), encoding="utf-8")
    tmp.replace(path)
