"""Weights & Biases as a mirror: `sonde.watch(model, mirror="wandb")`.

Goes to the run that is open, or opens one of the project's name. The numbers have an axis of their own, `sonde/step`,
so that they do not disturb the user's.
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
    """Forwards to `wandb.run`."""

    def begin(self, run: Mapping[str, Any]) -> None:
        self._is_own = wandb.run is None
        self._run: Any = wandb.run or wandb.init(
            project=run["project"], name=run["name"], config=dict(run["config"] or {}), tags=list(run["tags"] or [])
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
        if self._is_own:
            self._run.finish(exit_code=0 if status == "finished" else 1)
