"""TensorBoard as a mirror: `sonde.watch(model, mirror="tensorboard")` writes event files next to the runs.

The files are written by TensorBoard's own record writer into plain files. Its event writer would import TensorFlow, if
installed, on our thread: seconds of work, and a crash if the program ends meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from sonde.errors import MissingPackageError
from sonde.schema.layout import RunStatus
from sonde.session.observers.mirror import name_of
from sonde.write.folder import absolute
from sonde.write.items import FindingRow

try:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.summary_v2 import text_pb
    from tensorboard.summary.writer.record_writer import RecordWriter
except ImportError as error:
    raise MissingPackageError("tensorboard", "tensorboard", 'mirror="tensorboard"') from error

FOLDER_VARIABLE = "TENSORBOARD_LOGDIR"

__all__ = ["Sink"]


class Sink:
    """Writes to `tensorboard/<project>/<name>-<id>`, or below $TENSORBOARD_LOGDIR."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = absolute(folder or os.environ.get(FOLDER_VARIABLE) or "tensorboard")

    def begin(self, run: Mapping[str, Any]) -> None:
        folder = self.folder / str(run["project"]).replace("/", "_") / name_of(run).replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((folder / name).open("xb"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if run["config"]:
            self._text("config", f"```json\n{json.dumps(run['config'], indent=2, default=str)}\n```", step=0)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def rewound(self, step: int) -> None:
        """TensorBoard discards its data of this step and of later ones."""
        restart = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=step, session_log=restart))

    def finding(self, found: FindingRow) -> None:
        words = f"**{found.severity}** since step {found.step}: {found.message}\n\n{found.remedy}"
        self._text(f"findings/{found.rule}", words, step=max(found.step, 0))

    def close(self, status: RunStatus) -> None:
        self._writer.close()

    def _text(self, tag: str, words: str, *, step: int) -> None:
        summary = Summary.FromString(text_pb(tag, words).SerializeToString())
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()
