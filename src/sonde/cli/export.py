"""`sonde export RUN`: a run's tables as CSV, Parquet, JSON or HDF5 files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json

if TYPE_CHECKING:
    from sonde.run import Run
    from sonde.show.export.source import Source

ENDINGS: Final = {"csv": "csv", "parquet": "parquet", "json": "json", "hdf5": "h5"}
ONE_TABLE_PER_FILE: Final = ("csv", "parquet")


def export(
    run: RunName,
    what: Annotated[str, typer.Option("--what", "-w", help="stats, scalars, events, system, sites or all.")] = "all",
    format: Annotated[str, typer.Option("--format", "-f", help="csv, parquet, json or hdf5.")] = "parquet",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; for all as csv or parquet, the folder.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only steps A to B-1, as 100:200.")
    ] = None,
    series: Annotated[
        list[str] | None, typer.Option("--series", metavar="GLOB", help="Only these stats, as grad/*/norm.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Export a run's tables for other programs. A file is there whole or not at all.

    \b
    Examples:
      sonde export latest --what scalars --format csv -o loss.csv
      sonde export latest --what stats --series "grad/*/norm" --steps 1000:2000
      sonde export latest --format hdf5 -o run.h5
    """
    from sonde.errors import UnknownNameError
    from sonde.show.export.source import TABLES, sources

    if format not in ENDINGS:
        raise UnknownNameError("format", format, ENDINGS)
    if what not in (*TABLES, "all"):
        raise UnknownNameError("table", what, (*TABLES, "all"))
    if format == "hdf5":
        from sonde.show.export.hdf5 import require_h5py

        require_h5py()
    found = open_run(run, dir)
    tables = TABLES if what == "all" else (what,)
    paths = _paths(found, output, tables, format)
    _refuse_overwriting(paths, force)
    asked = sources(found, tables, series=tuple(series or ("*",)), steps=_parse_steps(steps))
    with _progress(asked, quiet=json) as watched:
        written = _write(found, watched, paths, format)
    files = [{"path": str(path), "bytes": path.stat().st_size} for path in written]
    print_json(files) if json else _report(files)


def _parse_steps(text: str | None) -> slice | None:
    from sonde.errors import UsageError

    if text is None:
        return None
    try:
        bounds = [int(part) if part.strip() else None for part in text.split(":")]
    except ValueError:
        bounds = []
    if not 1 <= len(bounds) <= 3 or bounds == [None] or (len(bounds) == 3 and bounds[2] is not None and bounds[2] < 1):
        raise UsageError(f'--steps is "first:stop", as in 100:200, :50 or -100:; got "{text}".')
    if len(bounds) == 1 and bounds[0] is not None:
        return slice(bounds[0], bounds[0] + 1 or None)
    return slice(*bounds)


def _paths(run: Run, output: Path | None, tables: tuple[str, ...], format: str) -> dict[str, Path]:
    """Where each table goes; a format that holds them all has one path for all."""
    ending = ENDINGS[format]
    if format in ONE_TABLE_PER_FILE and len(tables) > 1:
        folder = output or Path(run.path.name)
        return {table: folder / f"{table}.{ending}" for table in tables}
    label = tables[0] if len(tables) == 1 else "all"
    path = output or Path(f"{run.path.name}-{label}.{ending}")
    return dict.fromkeys(tables, path)


def _refuse_overwriting(paths: dict[str, Path], force: bool) -> None:
    from sonde.errors import UsageError

    for path in dict.fromkeys(paths.values()):
        if path.is_dir():
            raise UsageError(f"{path} is a folder. Name a file with -o.")
        if path.exists() and not force:
            raise UsageError(f"{path} is there already. Name another with -o, or replace it with --force.")


def _write(run: Run, sources: list[Source], paths: dict[str, Path], format: str) -> list[Path]:
    from sonde.show.export.atomic import replacing
    from sonde.show.export.source import run_facts

    if format not in ONE_TABLE_PER_FILE:
        (path,) = set(paths.values())
        with replacing(path) as draft:
            _writer(format)(draft, sources, run_facts(run))
        return [path]
    for source in sources:
        path = paths[source.name]
        if len(paths) > 1:
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            if format == "csv":
                _writer(format)(draft, source)
            else:
                _writer(format)(draft, source, run_facts(run))
    return list(paths.values())


def _writer(format: str) -> Any:
    if format == "csv":
        from sonde.show.export.csv import write_csv

        return write_csv
    if format == "parquet":
        from sonde.show.export.parquet import write_parquet

        return write_parquet
    if format == "json":
        from sonde.show.export.json import write_json

        return write_json
    from sonde.show.export.hdf5 import write_hdf5

    return write_hdf5


@contextmanager
def _progress(sources: list[Source], *, quiet: bool) -> Iterator[list[Source]]:
    """The same sources; a bar on stderr moves as they are read, where somebody is there to see it."""
    from rich.progress import Progress

    from sonde.show.export.source import Source
    from sonde.show.term.console import make_console

    with Progress(console=make_console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bar:

        def watched(source: Source) -> Iterator[Any]:
            task = bar.add_task(source.name, total=source.num_pieces)
            for piece in source.pieces:
                yield piece
                bar.advance(task)

        yield [Source(source.name, source.num_pieces, watched(source)) for source in sources]


def _report(files: list[dict[str, Any]]) -> None:
    from sonde.show.term.number import size
    from sonde.show.term.text import plain

    for file in files:
        print(f"{plain(file['path'])}  {size(file['bytes'])}")
