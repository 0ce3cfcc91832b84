"""MLflow as a mirror: `sonde.watch(model, mirror="mlflow")` logs to the active run, or starts one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

from sonde.errors import MissingPackageError
from sonde.schema.layout import RunStatus
from sonde.session.numbers import flattened
from sonde.write.items import FindingRow

try:
    import mlflow
    from mlflow.entities import Metric, Param
    from mlflow.store.db.db_types import DATABASE_ENGINES
except ImportError as error:
    raise MissingPackageError("mlflow", "mlflow", 'mirror="mlflow"') from error

_STATUS: Final = {"finished": "FINISHED", "crashed": "FAILED", "interrupted": "KILLED", "running": "RUNNING"}
_MAX_METRICS: Final = 1000
_MAX_PARAMS: Final = 100
_MAX_PARAM: Final = 500
_TAG: Final = "sonde.run_id"

__all__ = ["Sink"]


class Sink:
    """Forwards through MLflow's client, in batches of the size it accepts."""

    def __init__(self) -> None:
        uri = mlflow.get_tracking_uri()
        if uri.partition(":")[0] in DATABASE_ENGINES and find_spec("sqlalchemy") is None:
            raise MissingPackageError("sqlalchemy", "mlflow", f"MLflow's store {uri}")
        # The user's settings belong to their thread; they are read here, and used on ours.
        active = mlflow.active_run()
        self._run_id: str = active.info.run_id if active is not None else ""
        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        self._prefix = "sonde/" if active is not None else ""
        """The user's run may have a metric, or a parameter, of the same name."""

    @property
    def _is_own(self) -> bool:
        return not self._prefix

    def begin(self, run: Mapping[str, Any]) -> None:
        if self._is_own:
            self._run_id = self._found(run) or self._created(run)
        config = list(flattened(dict(run["config"] or {})))[:_MAX_PARAMS]
        params = [Param(_name(self._prefix + key), str(value)[:_MAX_PARAM]) for key, value in config]
        known = self._client.get_run(self._run_id).data.params  # a parameter cannot be changed
        self._client.log_batch(self._run_id, params=[param for param in params if param.key not in known])

    def _found(self, run: Mapping[str, Any]) -> str:
        """A resumed run of ours continues in the same MLflow run."""
        experiment = self._client.get_experiment_by_name(run["project"])
        if experiment is None:
            return ""
        same = self._client.search_runs([experiment.experiment_id], f"tags.`{_TAG}` = '{run['id']}'")
        for found in same[:1]:
            self._client.update_run(found.info.run_id, status="RUNNING")
        return str(same[0].info.run_id) if same else ""

    def _created(self, run: Mapping[str, Any]) -> str:
        experiment = self._client.get_experiment_by_name(run["project"])
        id = experiment.experiment_id if experiment else self._client.create_experiment(run["project"])
        return str(self._client.create_run(id, run_name=run["name"], tags={_TAG: run["id"]}).info.run_id)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_name(self._prefix + name), value, now, step) for name, value in values.items()]
        for first in range(0, len(metrics), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[first : first + _MAX_METRICS])

    def finding(self, found: FindingRow) -> None:
        text = f"{found.severity} since step {found.step}: {found.message} {found.remedy}"
        self._client.set_tag(self._run_id, f"sonde.finding.{found.rule}", text[:5000])

    def close(self, status: RunStatus) -> None:
        if self._is_own:
            self._client.set_terminated(self._run_id, _STATUS[status])


def _name(name: str) -> str:
    """MLflow accepts letters, digits and a few signs."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
