"""A report into a file, whole or not at all, in the format that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sonde.run import Run
from sonde.schema.records import to_json
from sonde.show.export.atomic import replacing
from sonde.show.report.source import OnStage, Report, gather
from sonde.show.report.target import Format


def write_report(run: Run, path: Path, format: Format, on_stage: OnStage = lambda _: None) -> Report:
    """Gather and write; gives back what it says."""
    if format in ("html", "pdf"):
        from sonde.show.report.html import require_assets

        require_assets()
    if format == "pdf":
        from sonde.show.report.pdf import require_browser

        require_browser()
    report = gather(run, on_stage)
    on_stage("writing")
    with replacing(path) as draft:
        _write(run, report, draft, format, on_stage)
    return report


def _write(run: Run, report: Report, path: Path, format: Format, on_stage: OnStage) -> None:
    if format == "json":
        path.write_text(to_text(report.as_dict()), encoding="utf-8")
    elif format == "md":
        from sonde.show.report.markdown import to_markdown

        path.write_text(to_markdown(report), encoding="utf-8")
    elif format == "html":
        from sonde.show.report.html import to_html

        path.write_text(to_html(run, report, on_stage), encoding="utf-8")
    else:
        from sonde.show.report.html import to_html
        from sonde.show.report.pdf import print_pdf

        print_pdf(to_html(run, report, on_stage, for_print=True), path)


def to_text(value: Any) -> str:
    """JSON in which numbers that JSON lacks are the texts "nan", "inf" and "-inf"."""
    return json.dumps(json.loads(to_json(value)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
