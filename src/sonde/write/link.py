"""A small file in a folder of checkpoints that names their run, and in the folder of one checkpoint also its step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sonde.schema.checkpoints import LINK_FILE
from sonde.write.durable import make_folder, write_durably


def write_link(folder: Path, run: Path, *, step: int | None = None) -> None:
    """The path is relative, so that both may be moved together. `step` is the one that comes after the checkpoint."""
    make_folder(folder)
    where = {"run": os.path.relpath(run.resolve(), folder.resolve()), "absolute": str(run.resolve())}
    content = {**where, **({} if step is None else {"step": step})}
    write_durably(folder / LINK_FILE, json.dumps(content).encode())
