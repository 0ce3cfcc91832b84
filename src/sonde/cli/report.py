"""`sonde report RUN|FOLDER`: a report of a run, or of a folder of checkpoints, as one self-contained file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonde.cli.options import Dir, Json, open_run, runs_dir
from sonde.cli.output import print_json, remark
from sonde.errors import RunNotFoundError, UsageError
from sonde.show.term.number import counted, size
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.run import Run
    from sonde.show.report.target import Format
    from sonde.tune.analyzer import CheckpointAnalyzer


def report(
    where: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run, a folder of checkpoints, or the output_dir of `sonde train`.",
        ),
    ] = "latest",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: RUN-report.html in this folder.")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option("--format", "-f", help="html, md, json, txt or pdf. Default: from the extension of -o."),
    ] = None,
    gradients: Annotated[
        Path | None,
        typer.Option("--gradients", help="Also write the gradients: full tensors to .npz, statistics to .parquet."),
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is not a report.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Write a report of a run or of its checkpoints.

    Covers findings, convergence, gradient flow, weights and overfitting. The HTML report is one file
    that works offline; PDF is the same report, printed by Chromium. The report of a folder of checkpoints (html, json
    or txt) also shows how the weights moved from one to the next.

    \b
    Examples:
      sonde report latest
      sonde report gpt/baseline -o baseline.html --open
      sonde report latest -o report.md
      sonde report latest --format txt -o -
      sonde report checkpoints --gradients gradients.parquet
      sonde report latest --format json -o - | jq .analyses[0].verdict
    """
    from sonde.show.report.target import default_path, pick_format, refuse_overwriting

    to_stdout = output is not None and str(output) == "-"
    found = _find(where, dir)
    kind = pick_format(None if to_stdout else output, format)
    if to_stdout:
        if open or kind == "pdf":
            raise UsageError("-o - prints html, md, json or txt; for a PDF, or with --open, name a file with -o.")
        _print(found, kind)
    else:
        path = output or default_path(_folder(found), kind)
        refuse_overwriting(path, force=force)
        _print_result(path, kind, _write(found, path, kind, quiet=json), as_json=json)
        if open:
            import webbrowser

            webbrowser.open(path.resolve().as_uri())
    if gradients is not None:
        write_gradients(_analyzer(found), gradients)


def find_checkpoints(where: str, dir: Path | None) -> CheckpointAnalyzer:
    """The analyzer of a folder of checkpoints or of a run."""
    from sonde.run import find_run
    from sonde.tune.analyzer import CheckpointAnalyzer

    path = Path(where)
    return CheckpointAnalyzer(path if path.is_dir() else find_run(where, runs_dir(dir)))


def write_gradients(analyzer: CheckpointAnalyzer, path: Path) -> None:
    """Write the gradients of the run that saved the checkpoints, and say which."""
    found = analyzer.export_raw_gradients(path)
    what = "full gradients" if found.is_whole else "gradient statistics"
    remark(f"Wrote {what} of {counted(len(found), 'parameter')} to {path}.")


def _find(where: str, dir: Path | None) -> Run | CheckpointAnalyzer:
    """A run, or a folder of checkpoints that is not itself a run."""
    from sonde.schema.layout import RUN_FILE

    if Path(where).is_dir() and not (Path(where) / RUN_FILE).exists():
        try:
            return find_checkpoints(where, dir)
        except RunNotFoundError:
            pass  # the error of opening it as a run says more
    return open_run(where, dir)


def _folder(found: Run | CheckpointAnalyzer) -> Path:
    from sonde.run import Run

    return found.path if isinstance(found, Run) else found.folder


def _analyzer(found: Run | CheckpointAnalyzer) -> CheckpointAnalyzer:
    from sonde.run import Run
    from sonde.tune.analyzer import CheckpointAnalyzer

    return CheckpointAnalyzer(found.path) if isinstance(found, Run) else found


def _write(found: Run | CheckpointAnalyzer, path: Path, kind: Format, *, quiet: bool) -> list[Any]:
    """Write the report. Returns its analyses."""
    from sonde.run import Run
    from sonde.show.export.atomic import replacing
    from sonde.show.report.standard import FORMATS
    from sonde.show.report.write import write_report

    if isinstance(found, Run) and kind != "txt":
        with _progress(quiet=quiet) as on_stage:
            return [*write_report(found, path, kind, on_stage).analyses]
    if kind not in FORMATS:
        raise UsageError(
            f"{_folder(found)} is a folder of checkpoints, whose report is html, json or txt. "
            "Choose one with --format, or name a run."
        )
    standard = _analyzer(found).generate_standard_report()
    with replacing(path) as draft:
        draft.write_text(standard.in_format(kind), encoding="utf-8")
    return standard.sections


def _print(found: Run | CheckpointAnalyzer, kind: Format) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"report.{kind}"
        _write(found, path, kind, quiet=True)
        text = path.read_text(encoding="utf-8")
    sys.stdout.write("\n".join(map(plain, text.split("\n"))) if kind == "txt" else text)


def _print_result(path: Path, kind: str, analyses: list[Any], *, as_json: bool) -> None:
    num_bytes = path.stat().st_size
    if as_json:
        verdicts = {one.key: {"tone": one.tone, "verdict": one.verdict} for one in analyses}
        print_json({"path": str(path), "format": kind, "bytes": num_bytes, "analyses": verdicts})
        return
    print(f"{plain(path)}  {size(num_bytes)}")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr that names the current stage; hidden when stderr is not a terminal."""
    from rich.progress import Progress

    from sonde.show.report.source import STAGES
    from sonde.show.term.console import make_console

    with Progress(console=make_console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=len(STAGES) + 2)

        def on_stage(stage: str) -> None:
            bar.update(task, description=stage, advance=1)

        yield on_stage
