"""Style and elements that all results share in a notebook.

Colours are derived from the notebook's own. Sections fold with <details>, which every notebook supports.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Final

from sonde.show.term.text import plain

SEVERITY_COLOURS: Final = {"critical": "#d7263d", "warning": "#c77700", "info": "#3f7cac"}
STATUS_COLOURS: Final = {"running": "#0b7fa5", "finished": "#2a8c5a", "crashed": "#d7263d", "interrupted": "#c77700"}
_CODE: Final = re.compile(r"`([^`]+)`")
_RULES: Final = {
    "": "font:13px/1.45 system-ui,sans-serif;border:1px solid rgba(128,128,128,.35);border-radius:8px;padding:12px;"
    "max-width:860px;color:inherit;background:transparent;overflow-wrap:anywhere",
    "*": "box-sizing:border-box",
    ".sonde-head": "display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline",
    ".sonde-name": "font-size:16px;font-weight:650",
    ".sonde-dim": "opacity:.7",
    ".sonde-top": "display:grid;grid-template-columns:minmax(0,3fr) minmax(110px,1fr);gap:14px;align-items:center;"
    "margin:8px 0",
    "svg": "display:block;width:100%;height:64px",
    "td svg": "width:120px;height:20px",
    ".sonde-health": "font-size:24px;font-weight:650;line-height:1.1",
    ".sonde-bar": "height:6px;border-radius:3px;background:rgba(128,128,128,.25);overflow:hidden;margin-top:4px",
    ".sonde-bar>span": "display:block;height:100%",
    "details": "border-top:1px solid rgba(128,128,128,.25);padding:5px 0",
    "summary": "cursor:pointer;font-weight:600",
    ".sonde-finding": "border-left:3px solid;padding:2px 0 2px 10px;margin:8px 0",
    "code": "font:12px ui-monospace,monospace;background:rgba(128,128,128,.15);color:inherit;padding:1px 5px;"
    "border-radius:4px;white-space:pre-wrap",
    ".sonde-wide": "overflow-x:auto;overflow-wrap:normal",
    "table": "border-collapse:collapse;margin:4px 0;color:inherit;background:transparent;font-size:12px",
    "th": "color:inherit;text-align:left;padding:1px 12px 1px 0;border:0;background:transparent;font-weight:400",
    "td": "color:inherit;text-align:left;padding:1px 12px 1px 0;border:0;background:transparent;vertical-align:top",
    ".sonde-n": "text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap",
    ".sonde-warn": "color:#c77700",
}
# Three times, so that these rules are more specific than Jupyter's, which aligns all cells to the right.
_ROOT: Final = ".sonde-card.sonde-card.sonde-card"
STYLE: Final = "".join(f"{_ROOT} {selector}".strip() + f"{{{rules}}}" for selector, rules in _RULES.items())


def frame(content: str) -> str:
    """The element that holds a result, with its style."""
    return f'<div class="sonde-card"><style>{STYLE}</style>{content}</div>'


def safe(value: object) -> str:
    """Any text, escaped, with invisible characters made visible."""
    return html.escape(plain(value), quote=True)


def prose(text: str) -> str:
    """Sentences, escaped, with the text in backticks as code and line breaks kept."""
    return "<br>".join(_CODE.sub(r"<code>\1</code>", safe(line)) for line in text.splitlines())


def dim(content: str) -> str:
    """Less important HTML."""
    return f'<div class="sonde-dim">{content}</div>'


def fold(title: str, content: str, *, is_open: bool = False) -> str:
    """A section under its title, or nothing if it is empty."""
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{content}</details>" if content else ""


def grid(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[bool]) -> str:
    """A table of HTML cells; columns of numbers are aligned to the right."""
    classes = [' class="sonde-n"' if is_number else "" for is_number in numbers]
    head = "".join(
        f'<th class="{"sonde-n " if is_number else ""}sonde-dim">{title}</th>'
        for title, is_number in zip(titles, numbers, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{kind}>{cell}</td>' for kind, cell in zip(classes, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="sonde-wide"><table><tr>{head}</tr>{body}</table></div>'
