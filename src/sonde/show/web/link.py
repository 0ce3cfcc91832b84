"""`sonde.ui()`: the dashboard from a notebook or a script, as a link. It is served by a thread of this process.

The link opens in its own tab. It is never embedded in the notebook: the dashboard refuses frames, so that no page
can draw over it or read it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Final

from sonde.config import Settings
from sonde.run import find_run
from sonde.show.web.server import Address, Dashboard, tunnel_line

_running: Final[dict[tuple[Path, ...], DashboardLink]] = {}


def ui(
    runs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None, *, port: int | None = None
) -> DashboardLink:
    """Start the dashboard and show its link; from another machine, also how to reach it.

    `runs` is a folder of runs, a run, or several of these; by default the folder of runs. The dashboard stops with the
    program, or with `.stop()`. A second call with the same runs returns the same link.

    sonde.ui()
    """
    names = [runs] if isinstance(runs, str | os.PathLike) else list(runs or ())
    folder = Settings.load().dir
    places = tuple(_place(os.fspath(name), folder) for name in names) or (folder.absolute(),)
    found = _running.get(places)
    if found is None or not found.is_running:
        found = _running[places] = DashboardLink(Dashboard(places, Address(port=port)))
    return found


def _place(name: str, folder: Path) -> Path:
    return Path(name).absolute() if Path(name).is_dir() else find_run(name, folder)


class DashboardLink:
    """A dashboard that runs in this process. Its text is its URL and, on another machine, how to reach it."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.url = dashboard.url
        self._dashboard = dashboard
        self._thread = threading.Thread(target=dashboard.serve, name="sonde-ui", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Stop the dashboard; training and runs are unaffected."""
        self._dashboard.stop()
        self._thread.join(10)

    def __repr__(self) -> str:
        return "\n".join([self.url, *remarks(self._dashboard.port, os.environ)])

    def _repr_html_(self) -> str:
        notes = "".join(f"<div><code>{escape(line)}</code></div>" for line in remarks(self._dashboard.port, os.environ))
        return f'<div><a href="{escape(self.url)}" target="_blank" rel="noopener">Open the dashboard</a></div>{notes}'


def remarks(port: int, environment: Mapping[str, str]) -> list[str]:
    """How a browser on another machine reaches the port of this one; nothing if this machine has the browser.

    >>> remarks(7007, {})
    []
    """
    if "google.colab" in sys.modules or "JUPYTERHUB_SERVICE_PREFIX" in environment:
        place = "Colab" if "google.colab" in sys.modules else "this JupyterHub"
        return [
            f"The link opens only on the machine of the kernel; {place} does not forward ports to your browser.",
            "Write the same pages to one file and download it:  sonde.show.report_run(sonde.open('latest'))",
        ]
    if "SSH_CONNECTION" in environment:
        return [f"From your own machine, first run:  {tunnel_line(port)}"]
    return []
