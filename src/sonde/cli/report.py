"""`sonde report RUN`: how a run went, in one file that needs nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json
from sonde.show.term.number import size
from sonde.show.term.text import plain


def report(
    run: RunName = "latest",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file. Default: RUN-report.html in this folder.")
    ] = None,
    format: Annotated[
        str | None, typer.Option("--format", "-f", help="html, md, json or pdf. Default: what the ending says.")
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not a report.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Write a report of a run: findings, convergence, gradient flow, weights, overfitting.

    HTML is one file with everything in it, for a browser without a network; PDF is the same, printed by Chromium.

    \b
    Examples:
      sonde report latest
      sonde report gpt/baseline -o baseline.html --open
      sonde report latest -o report.md
      sonde report latest --format json -o - | jq .analyses[0].verdict
    """
    from sonde.errors import UsageError
    from sonde.show.report.target import default_path, pick_format, refuse_overwriting
    from sonde.show.report.write import write_report

    to_stdout = output is not None and str(output) == "-"
    found = open_run(run, dir)
    kind = pick_format(None if to_stdout else output, format)
    if to_stdout:
        if open or kind == "pdf":
            raise UsageError("-o - prints html, md or json; a PDF, or what --open shows, needs a file.")
        _print(found, kind)
        return
    path = output or default_path(found.path, kind)
    refuse_overwriting(path, force=force)
    with _progress(quiet=json) as on_stage:
        written = write_report(found, path, kind, on_stage)
    _tell(path, kind, written, as_json=json)
    if open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _print(found: object, kind: str) -> None:
    import tempfile

    from sonde.run import Run
    from sonde.show.report.target import pick_format
    from sonde.show.report.write import write_report

    assert isinstance(found, Run)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"report.{kind}"
        write_report(found, path, pick_format(path, None))
        sys.stdout.write(path.read_text(encoding="utf-8"))


def _tell(path: Path, kind: str, written: object, *, as_json: bool) -> None:
    from sonde.show.report.source import Report

    assert isinstance(written, Report)
    num_bytes = path.stat().st_size
    if as_json:
        verdicts = {one.key: {"tone": one.tone, "verdict": one.verdict} for one in written.analyses}
        print_json({"path": str(path), "format": kind, "bytes": num_bytes, "analyses": verdicts})
        return
    print(f"{plain(path)}  {size(num_bytes)}")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that names what is being done, where somebody is there to see it."""
    from rich.progress import Progress

    from sonde.show.report.source import STAGES
    from sonde.show.term.console import make_console

    with Progress(console=make_console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=len(STAGES) + 2)

        def on_stage(stage: str) -> None:
            bar.update(task, description=stage, advance=1)

        yield on_stage
