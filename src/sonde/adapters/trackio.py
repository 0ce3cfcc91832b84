"""trackio as a mirror: `sonde.watch(model, mirror="trackio")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.errors import MissingPackageError
from sonde.schema.layout import RunStatus
from sonde.session.observers.mirror import name_of
from sonde.write.items import FindingRow

try:
    import trackio
except ImportError as error:
    raise MissingPackageError("trackio", "trackio", 'mirror="trackio"') from error

_LEVELS: Final = {
    "critical": trackio.AlertLevel.ERROR,
    "warning": trackio.AlertLevel.WARN,
    "info": trackio.AlertLevel.INFO,
}

__all__ = ["Sink"]


class Sink:
    """Forwards to a separate run of the same name."""

    def begin(self, run: Mapping[str, Any]) -> None:
        self._run: Any = trackio.init(
            project=str(run["project"]),
            name=name_of(run),
            config=dict(run["config"] or {}),
            resume="allow",  # a resumed run of ours continues there
            embed=False,
            auto_log_cpu=False,  # the run already has system metrics
            auto_log_gpu=False,
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finding(self, found: FindingRow) -> None:
        self._run.alert(
            title=f"sonde: {found.rule}",
            text=f"Since step {found.step}: {found.message} {found.remedy}",
            level=_LEVELS.get(found.severity, trackio.AlertLevel.INFO),
            step=max(found.step, 0),
        )

    def close(self, status: RunStatus) -> None:
        self._run.finish()
