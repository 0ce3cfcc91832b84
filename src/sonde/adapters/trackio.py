"""trackio as a mirror: `sonde.watch(model, mirror="trackio")`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.errors import MissingPackageError
from sonde.record.items import FindingRow
from sonde.schema.layout import RunStatus
from sonde.session.mirror import name_of

try:
    import trackio
except ImportError as error:
    raise MissingPackageError("trackio", "trackio", 'mirror="trackio"') from error


class Sink:
    """Forwards to a run of its own, of the same name."""

    def begin(self, run: Mapping[str, Any]) -> None:
        self._run: Any = trackio.init(
            project=str(run["project"]),
            name=name_of(run),
            config=dict(run["config"] or {}),
            embed=False,
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finding(self, found: FindingRow) -> None:
        self._run.alert(title=f"sonde: {found.rule}", text=f"{found.message} (since step {found.step}). {found.remedy}")

    def close(self, status: RunStatus) -> None:
        self._run.finish()
