"""run.json: the facts and the status of a run. Replaced atomically, so that a reader sees one version or the other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonde.distribution import DISTRIBUTION
from sonde.errors import CorruptError, FormatError, NotARunError, RunError
from sonde.schema.layout import FORMAT_VERSION, RUN_FILE
from sonde.schema.records import sign_document, to_json
from sonde.write.durable import write_durably

_CHANGING = ("status", "reason", "ended_time", "heartbeat", "facts")


class RunFile:
    """The file in memory. The part that is constant between heartbeats is turned into JSON once."""

    def __init__(self, run: Path, content: Mapping[str, Any]) -> None:
        self.path = run / RUN_FILE
        self.content: dict[str, Any] = dict(content)
        self._fixed_json = ""

    @staticmethod
    def load(run: Path) -> RunFile:
        """Read a run's file, or raise an error that says why it is invalid."""
        try:
            content = json.loads((run / RUN_FILE).read_bytes())
        except FileNotFoundError:
            raise NotARunError(f"{run} is not a run: it has no {RUN_FILE}. Pass a folder that contains one.") from None
        except OSError as error:
            raise RunError(f"cannot read {run / RUN_FILE}: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise CorruptError(f"{run / RUN_FILE} is damaged ({error}). Start a new run.") from error
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise NotARunError(f"{run / RUN_FILE} does not belong to a run: it has no format.")
        if content["format"] > FORMAT_VERSION:
            raise FormatError(
                f"{run} has format {content['format']}; this version of sonde writes {FORMAT_VERSION}. Run:  "
                f"pip install -U {DISTRIBUTION}"
            )
        content.pop("crc32", None)  # of the previous content; `write` signs the new one
        return RunFile(run, content)

    def fix(self, **facts: Any) -> None:
        """Change the part that is constant between heartbeats."""
        self.content.update(facts)
        self._fixed_json = ""

    def write(self, *, sync_name: bool = True, **changing: Any) -> None:
        """Replace the file. A heartbeat may skip the folder's fsync: losing one does not matter."""
        self.content.update(changing)
        if not self._fixed_json:
            self._fixed_json = to_json({key: value for key, value in self.content.items() if key not in _CHANGING})
        changing_json = to_json({key: self.content.get(key) for key in _CHANGING})
        text = sign_document(f"{self._fixed_json[:-1]}, {changing_json[1:]}")
        write_durably(self.path, text.encode(), sync_name=sync_name)
