"""run.json: what a run is, and how it is doing. Rewritten whole, so that a reader sees one version or the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde.errors import CorruptError, FormatError, NotARunError, RunError
from sonde.schema.layout import FORMAT_VERSION, RUN_FILE
from sonde.schema.records import sign_document, to_json
from sonde.write.durable import write_durably

_CHANGING = ("status", "reason", "ended_time", "heartbeat", "facts")


class RunFile:
    """The file in memory. What does not change between heartbeats is turned into JSON once."""

    def __init__(self, run: Path, content: Mapping[str, Any]) -> None:
        self.path = run / RUN_FILE
        self.content: dict[str, Any] = dict(content)
        self._fixed_json = ""

    @staticmethod
    def load(run: Path) -> RunFile:
        """Read a run's file, or say why it is none."""
        try:
            content = json.loads((run / RUN_FILE).read_bytes())
        except FileNotFoundError:
            raise NotARunError(f"{run} is not a run: it has no {RUN_FILE}. Give the folder that holds one.") from None
        except OSError as error:
            raise RunError(f"cannot read {run / RUN_FILE}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{run / RUN_FILE} is damaged ({error}). Start a new run.") from error
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise NotARunError(f"{run / RUN_FILE} is not a run's: it names no format.")
        if content["format"] > FORMAT_VERSION:
            raise FormatError(
                f"{run} has format {content['format']}; this sonde writes {FORMAT_VERSION}. Run:  pip install -U sonde"
            )
        content.pop("crc32", None)  # of the file as it was; `write` signs what it writes
        return RunFile(run, content)

    def fix(self, **facts: Any) -> None:
        """Change what does not change between heartbeats."""
        self.content.update(facts)
        self._fixed_json = ""

    def write(self, *, sync_name: bool = True, **changing: Any) -> None:
        """Replace the file. A heartbeat may skip the folder's fsync: losing one is no loss."""
        self.content.update(changing)
        if not self._fixed_json:
            self._fixed_json = to_json({key: value for key, value in self.content.items() if key not in _CHANGING})
        changing_json = to_json({key: self.content.get(key) for key in _CHANGING})
        text = sign_document(f"{self._fixed_json[:-1]}, {changing_json[1:]}")
        write_durably(self.path, text.encode(), sync_name=sync_name)
