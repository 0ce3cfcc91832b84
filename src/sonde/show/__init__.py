"""Views of a run. All views are built on `Run`, so that they agree.

Public: what the commands `report`, `export`, `delete` and `snapshot` do, as functions of a `Run`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sonde.show.export.run import export_run
    from sonde.show.report.source import Report, gather
    from sonde.show.report.write import report_run
    from sonde.show.snapshot_request import request_snapshot
    from sonde.show.trash import delete_run

_HOME_OF: Final = {
    "Report": "sonde.show.report.source",
    "delete_run": "sonde.show.trash",
    "export_run": "sonde.show.export.run",
    "gather": "sonde.show.report.source",
    "report_run": "sonde.show.report.write",
    "request_snapshot": "sonde.show.snapshot_request",
}
__all__ = ["Report", "delete_run", "export_run", "gather", "report_run", "request_snapshot"]


def __getattr__(name: str) -> Any:
    """Each name is loaded on first use: deleting a run does not import a report."""
    if name not in _HOME_OF:
        from sonde.errors import no_attribute

        raise no_attribute(__name__, name, __all__)
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
