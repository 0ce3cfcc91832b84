"""Write a report atomically in the requested format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sonde.errors import UsageError
from sonde.run import Run
from sonde.schema.records import to_json
from sonde.show.export.atomic import replacing
from sonde.show.report.source import OnStage, Report, gather
from sonde.show.report.target import Format, default_path, pick_format, refuse_overwriting


def report_run(
    run: Run, output: str | os.PathLike[str] | None = None, *, format: str | None = None, force: bool = False
) -> Report:
    """Write a report like `sonde report`, and return its contents. Without `output`, it is RUN-report.html.

    sonde.show.report_run(run, "report.md").analyses
    """
    path = None if output is None else Path(output)
    kind = pick_format(path, format)
    if kind == "txt":
        raise UsageError(
            "a text report comes from  sonde.tune.CheckpointAnalyzer(run.path).generate_standard_report(). "
            "Choose another format= or output=."
        )
    path = path or default_path(run.path, kind)
    refuse_overwriting(path, force=force)
    return write_report(run, path, kind)


def write_report(run: Run, path: Path, format: Format, on_stage: OnStage = lambda _: None) -> Report:
    """Gather and write a report; returns its contents."""
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
    """JSON in which non-finite numbers are the strings "nan", "inf" and "-inf"."""
    return json.dumps(json.loads(to_json(value)), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
