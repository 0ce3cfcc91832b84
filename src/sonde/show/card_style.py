"""How the card of a notebook looks. Every rule begins with its class: nothing else of the notebook is touched."""

from __future__ import annotations

from typing import Final

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
    ".sonde-health": "font-size:24px;font-weight:650;line-height:1.1",
    ".sonde-bar": "height:6px;border-radius:3px;background:rgba(128,128,128,.25);overflow:hidden;margin-top:4px",
    ".sonde-bar>span": "display:block;height:100%",
    "details": "border-top:1px solid rgba(128,128,128,.25);padding:5px 0",
    "summary": "cursor:pointer;font-weight:600",
    ".sonde-finding": "border-left:3px solid;padding:2px 0 2px 10px;margin:8px 0",
    "code": "font:12px ui-monospace,monospace;background:rgba(128,128,128,.15);color:inherit;padding:1px 5px;"
    "border-radius:4px;white-space:pre-wrap",
    "table": "border-collapse:collapse;margin:4px 0;color:inherit;background:transparent;font-size:12px",
    "th": "text-align:left;padding:1px 12px 1px 0;border:0;background:transparent;font-weight:400",
    "td": "text-align:left;padding:1px 12px 1px 0;border:0;background:transparent;vertical-align:top",
    ".sonde-n": "text-align:right;font-variant-numeric:tabular-nums",
    ".sonde-warn": "color:#c77700",
}
STYLE: Final = "".join(f".sonde-card {selector}".strip() + f"{{{rules}}}" for selector, rules in _RULES.items())
