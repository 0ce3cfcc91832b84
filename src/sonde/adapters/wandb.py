"""Weights & Biases as a mirror: `sonde.watch(model, mirror="wandb")`.

Goes to a run of its own, beside the one that is open: every row of W&B's counts its step on, and a row of ours between
the user's would have theirs dropped as "less than the current step".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.errors import MissingPackageError
from sonde.record.items import FindingRow
from sonde.schema.layout import RunStatus

try:
    import wandb
except ImportError as error:
    raise MissingPackageError("wandb", "wandb", 'mirror="wandb"') from error

_LEVELS = {"critical": "ERROR", "warning": "WARN", "info": "INFO"}


class Sink:
    """Forwards to a run named after the user's, in the same project and group; or after ours where none is open."""

    def __init__(self) -> None:
        self._theirs: Any = wandb.run  # asked for on the user's thread: by the time we begin, it may be another one

    def begin(self, run: Mapping[str, Any]) -> None:
        placed = {"project": run["project"], "name": run["name"]} if self._theirs is None else _beside(self._theirs)
        self._run: Any = wandb.init(
            **placed,
            config=dict(run["config"] or {}),
            tags=list(run["tags"] or []),
            job_type="sonde",
            reinit="create_new",  # `wandb.run` and `wandb.log` stay the user's
            # What their own run has already: what is printed, and what the machine does.
            settings=wandb.Settings(console="off", quiet=True, x_disable_stats=True),
        )
        self._run.define_metric("sonde/step")
        self._run.define_metric("sonde/*", step_metric="sonde/step")

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"sonde/step": step, **{f"sonde/{name}": value for name, value in values.items()}})

    def finding(self, found: FindingRow) -> None:
        self._run.alert(
            title=f"sonde: {found.rule}",
            text=f"{found.message} (since step {found.step}). {found.remedy}",
            level=_LEVELS.get(found.severity, "INFO"),
        )
        self._run.summary[f"sonde/findings/{found.rule}"] = found.message

    def close(self, status: RunStatus) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)


def _beside(theirs: Any) -> dict[str, Any]:
    """Where a run is found by who looks for this one."""
    name = theirs.name or theirs.id
    return {
        "project": theirs.project,
        "entity": theirs.entity or None,
        "group": theirs.group or name,
        "name": f"{name}-sonde",
        "dir": theirs.settings.root_dir,
        "mode": "disabled" if theirs.disabled else "offline" if theirs.offline else "online",
    }
