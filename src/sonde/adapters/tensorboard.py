"""TensorBoard as a mirror: `sonde.watch(model, mirror="tensorboard")` writes event files beside the runs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde.errors import MissingPackageError
from sonde.record.items import FindingRow
from sonde.schema.layout import RunStatus
from sonde.session.mirror import name_of

try:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter
except ImportError as error:
    raise MissingPackageError("tensorboard", "tensorboard", 'mirror="tensorboard"') from error

FOLDER_VARIABLE = "TENSORBOARD_LOGDIR"


class Sink:
    """Writes to `tensorboard/<project>/<name>-<id>`, or below $TENSORBOARD_LOGDIR."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder or os.environ.get(FOLDER_VARIABLE) or "tensorboard")

    def begin(self, run: Mapping[str, Any]) -> None:
        name = name_of(run).replace("/", "_")
        self._writer = EventFileWriter(str(self.folder / str(run["project"]).replace("/", "_") / name))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def finding(self, found: FindingRow) -> None:
        words = f"**{found.severity}** since step {found.step}: {found.message}\n\n{found.remedy}"
        summary = Summary.FromString(text_pb(f"findings/{found.rule}", words).SerializeToString())
        self._writer.add_event(Event(wall_time=time.time(), step=max(found.step, 0), summary=summary))

    def close(self, status: RunStatus) -> None:
        self._writer.close()
