"""A report as one HTML file: the dashboard's own program with its answers inside. It reaches nothing outside itself."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
from typing import Final

from sonde.errors import SondeError
from sonde.run import Run
from sonde.show.report.answers import collect
from sonde.show.report.source import OnStage, Report
from sonde.show.term.text import plain
from sonde.show.web.assets import FOLDER
from sonde.show.web.runs import run_key
from sonde.show.web.wire import pack

_LINE: Final = 20_000
"""Editors and mail programs choke on a line of megabytes."""


class NotBuiltError(SondeError):
    """This copy of sonde has no front-end."""


def require_assets() -> None:
    """Say what to do where the front-end was not built."""
    if not all((FOLDER / name).is_file() for name in ("app.js", "app.css")):
        raise NotBuiltError(
            "an HTML report needs the front-end, and this copy of sonde was installed without it. Build it with "
            "`make web` in a checkout, or install a released wheel; --format md and json need nothing."
        )


def to_html(run: Run, report: Report, on_stage: OnStage = lambda _: None, *, for_print: bool = False) -> str:
    """The file. `for_print` unfolds everything and draws it in light colours."""
    data = base64.b64encode(gzip.compress(pack(collect(run, report, on_stage)), 9, mtime=0)).decode("ascii")
    script = _inline((FOLDER / "app.js").read_text(encoding="utf-8"))
    style = (FOLDER / "app.css").read_text(encoding="utf-8").replace("</", "<\\/")
    icon = (
        base64.b64encode((FOLDER / "icon.svg").read_bytes()).decode("ascii") if (FOLDER / "icon.svg").is_file() else ""
    )
    # Nothing may be loaded, nothing may run but the one script whose hash is here.
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(f"{plain(report.facts['project'])}/{plain(report.facts['name'])} · sonde report")
    print_mark = ' data-print data-theme="light"' if for_print else ""
    return f"""<!doctype html>
<html lang="en" data-run="{run_key(run.path)}"{print_mark}>
<head>
<meta charset="utf-8">
<meta name="generator" content="sonde report">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This report needs JavaScript to draw. Without it: sonde report RUN --format md</noscript>
<script type="application/octet-stream" id="sonde-data">
{_lines(data)}
</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _inline(script: str) -> str:
    """JavaScript that HTML does not take for its own: both occur in texts only, where a backslash says the same."""
    return script.replace("</script", "<\\/script").replace("<!--", "\\x3C!--")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


def _lines(text: str) -> str:
    return "\n".join(text[start : start + _LINE] for start in range(0, len(text), _LINE))
