"""A report as one HTML file: the dashboard's front-end with its data embedded. It loads nothing from outside."""

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
"""Line length of the data: editors and mail programs cannot handle lines of megabytes."""


class NotBuiltError(SondeError):
    """This installation of sonde has no front-end."""


def require_assets() -> None:
    """Raise an error that says what to do if the front-end was not built."""
    if not all((FOLDER / name).is_file() for name in ("app.js", "app.css")):
        raise NotBuiltError(
            "an HTML report needs the front-end, and sonde was installed without it. Build it with `make web` in a "
            "checkout, install a released wheel, or set format= to md or json, which do not need it."
        )


def to_html(run: Run, report: Report, on_stage: OnStage = lambda _: None, *, for_print: bool = False) -> str:
    """Render the page. `for_print` unfolds every section and uses light colours."""
    data = base64.b64encode(gzip.compress(pack(collect(run, report, on_stage)), 9, mtime=0)).decode("ascii")
    script = _inline((FOLDER / "app.js").read_text(encoding="utf-8"))
    style = (FOLDER / "app.css").read_text(encoding="utf-8").replace("</", "<\\/")
    icon = (
        base64.b64encode((FOLDER / "icon.svg").read_bytes()).decode("ascii") if (FOLDER / "icon.svg").is_file() else ""
    )
    # Nothing may be loaded, and only the script with this hash may run.
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
<noscript>This report needs JavaScript. For a version without it, run: sonde report RUN --format md</noscript>
<script type="application/octet-stream" id="sonde-data">
{_lines(data)}
</script>
<script type="module">{script}</script>
</body>
</html>
"""


def _inline(script: str) -> str:
    """Escape what would end a script element; it occurs only in strings, where a backslash changes nothing."""
    return script.replace("</script", "<\\/script").replace("<!--", "\\x3C!--")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"


def _lines(text: str) -> str:
    return "\n".join(text[start : start + _LINE] for start in range(0, len(text), _LINE))
