"""Weights & Biases as a mirror: `sonde.watch(model, mirror="wandb")`.

Logs to a separate run, next to the one that is open: every row on W&B advances its step, and a row of ours between the
user's would have theirs dropped as "less than the current step".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from sonde.errors import MissingPackageError
from sonde.schema.layout import RunStatus
from sonde.write.folder import absolute
from sonde.write.items import FindingRow

try:
    import wandb
except ImportError as error:
    raise MissingPackageError("wandb", "wandb", 'mirror="wandb"') from error

_LEVELS: Final = {"critical": "ERROR", "warning": "WARN", "info": "INFO"}
_INIT_TIMEOUT_S: Final = 30.0
"""By default W&B, and with it the end of the program, waits three times as long for a server that does not respond."""

__all__ = ["Sink"]


class Sink:
    """Forwards to a run named after the user's, in the same project and group; or after ours if none is open."""

    def __init__(self) -> None:
        self._folder = os.environ.get("WANDB_DIR") or str(absolute("."))
        self._theirs: Any = wandb.run  # read on the user's thread: by the time we start, it may be another one

    def begin(self, run: Mapping[str, Any]) -> None:
        ours = {"project": run["project"], "name": run["name"], "id": run["id"], "dir": self._folder}
        placed = ours if self._theirs is None else _beside(self._theirs, run)
        self._run: Any = wandb.init(
            **placed,
            resume="allow",  # a resumed run of ours continues there
            config=dict(run["config"] or {}),
            tags=list(run["tags"] or []),
            job_type="sonde",
            reinit="create_new",  # `wandb.run` and `wandb.log` stay the user's
            settings=wandb.Settings(
                console="off",  # their own run has the console output and system metrics
                x_disable_stats=True,
                quiet=True,
                init_timeout=_INIT_TIMEOUT_S,
            ),
        )
        self._run.define_metric("sonde/step")
        self._run.define_metric("sonde/*", step_metric="sonde/step")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"sonde/step": step, **{f"sonde/{name}": value for name, value in values.items()}})

    def finding(self, found: FindingRow) -> None:
        self._run.alert(
            title=f"sonde: {found.rule}",
            text=f"Since step {found.step}: {found.message} {found.remedy}",
            level=_LEVELS.get(found.severity, "INFO"),
        )
        self._run.summary[f"sonde/findings/{found.rule}"] = found.message

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _beside(theirs: Any, run: Mapping[str, Any]) -> dict[str, Any]:
    """Next to the user's run: in its project and group, and named after it."""
    name = theirs.name or theirs.id
    return {
        "project": theirs.project,
        "entity": theirs.entity or None,
        "group": theirs.group or name,
        "name": f"{name}-sonde",
        "id": f"{theirs.id}-{run['id']}",
        "dir": theirs.settings.root_dir,
        "mode": "disabled" if theirs.disabled else "offline" if theirs.offline else "online",
    }
