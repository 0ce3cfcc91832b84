"""MLflow as a mirror: `sonde.watch(model, mirror="mlflow")` logs to the active run, or begins one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from sonde.errors import MissingPackageError
from sonde.record.items import FindingRow
from sonde.schema.layout import RunStatus

try:
    import mlflow
    from mlflow.entities import Metric, Param
except ImportError as error:
    raise MissingPackageError("mlflow", "mlflow", 'mirror="mlflow"') from error

_STATUS: Final = {"finished": "FINISHED", "crashed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
_MAX_METRICS: Final = 1000
_MAX_PARAMS: Final = 100


class Sink:
    """Forwards through MLflow's client, in batches of the size it takes."""

    def __init__(self) -> None:
        # What the user has set belongs to their thread; it is asked for here, and used on ours.
        active = mlflow.active_run()
        self._run_id: str | None = active.info.run_id if active is not None else None
        self._client: Any = mlflow.MlflowClient()
        self._is_own = active is None

    def begin(self, run: Mapping[str, Any]) -> None:
        if self._run_id is None:
            experiment = self._client.get_experiment_by_name(run["project"])
            id = experiment.experiment_id if experiment else self._client.create_experiment(run["project"])
            self._run_id = self._client.create_run(id, run_name=run["name"]).info.run_id
        config = list(dict(run["config"] or {}).items())[:_MAX_PARAMS]
        params = [Param(str(key), str(value)[:500]) for key, value in config]
        if self._is_own and params:
            self._client.log_batch(self._run_id, params=params)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_name(name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MAX_METRICS])

    def finding(self, found: FindingRow) -> None:
        text = f"{found.severity} since step {found.step}: {found.message} {found.remedy}"
        self._client.set_tag(self._run_id, f"sonde.finding.{found.rule}", text[:5000])

    def close(self, status: RunStatus) -> None:
        if self._is_own:
            self._client.set_terminated(self._run_id, _STATUS[status])


def _name(name: str) -> str:
    """MLflow takes letters, digits and a few signs."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
