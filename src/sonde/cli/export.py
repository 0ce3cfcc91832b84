"""`sonde export RUN`: a run's tables and whole tensors as files of other programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sonde.cli.export_place import (
    choose_format,
    explaining_a_full_disk,
    refuse_file_for_many,
    refuse_place,
    require_folder,
)
from sonde.cli.options import Dir, Json, RunName, open_run
from sonde.cli.output import print_json, remark
from sonde.show.term.number import size
from sonde.show.term.text import plain

if TYPE_CHECKING:
    from sonde.run import Run
    from sonde.show.export.parts import Parts
    from sonde.show.export.source import Source

ENDINGS: Final = {"csv": "csv", "parquet": "parquet", "arrow": "arrow", "json": "json", "hdf5": "h5"}
ONE_TABLE_PER_FILE: Final = ("csv", "parquet", "arrow")


def export(
    run: RunName,
    what: Annotated[
        str,
        typer.Option(
            "--what",
            "-w",
            help="Tables: stats, scalars, events, system, sites or all. "
            "Whole tensors: weights, gradients, activations, optimizer or tensors.",
        ),
    ] = "all",
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="h5, parquet, arrow; of tables also csv, json; of tensors also safetensors, npz. "
            "Default: by the ending of -o, or parquet, of tensors safetensors.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file; for several tables or steps that go one a file, the folder."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="A:B", help="Only steps A to B-1, as 100:200; or one, as 100.")
    ] = None,
    series: Annotated[
        list[str] | None,
        typer.Option(
            "--series", metavar="GLOB", help="Only these stats, as grad/*/norm, or tensors, as grad/layers.3.*"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Export a run's tables or whole tensors for other programs. A file is there whole or not at all.

    A long export that was interrupted goes on where it was when it is asked for again. Exported tensors open with
    `sonde.read.tensors.exports.open_export`, every name and type as it was.

    \b
    Examples:
      sonde export latest --what scalars -o loss.csv
      sonde export latest --what stats --series "grad/*/norm" --steps 1000:2000
      sonde export latest -o run.h5
      sonde export latest --what gradients --steps 100:200 --format h5
      sonde export latest --what weights --steps=-1: -o model.safetensors
    """
    from sonde.errors import UnknownNameError
    from sonde.show.export.source import TABLES
    from sonde.show.export.tensors import FORMATS, KINDS

    if what not in (*TABLES, *KINDS, "all"):
        raise UnknownNameError("table or kind of tensors", what, (*TABLES, *KINDS, "all"))
    known, default = (FORMATS, "safetensors") if what in KINDS else (ENDINGS, "parquet")
    chosen = choose_format(what, format, output, known, default)
    if chosen == "hdf5":
        from sonde.schema.snapshots.exported import require_h5py

        require_h5py()
    found = open_run(run, dir)
    globs, span = tuple(series or ("*",)), _parse_steps(steps)
    if what in KINDS:
        written = _export_tensors(found, what, chosen, output, globs, span, force=force, quiet=json)
    else:
        tables = TABLES if what == "all" else (what,)
        written = _export_tables(found, tables, chosen, output, globs, span, force=force, quiet=json)
    files = [{"path": str(path), "bytes": path.stat().st_size} for path in written]
    print_json(files) if json else _report(files)


def _export_tensors(
    run: Run,
    what: str,
    format: str,
    output: Path | None,
    names: tuple[str, ...],
    steps: slice | None,
    *,
    force: bool,
    quiet: bool,
) -> list[Path]:
    from sonde.show.export.tensors import default_path, is_folder, plan_export, write_export
    from sonde.show.progress import progress

    asked = plan_export(run, what, format, names=names, steps=steps)
    path = output or default_path(asked)
    if is_folder(asked):
        refuse_file_for_many(output, f"{len(asked.steps)} steps", format, "choose a step with --steps")
    refuse_place([path], force=force, may_be_folder=is_folder(asked))
    require_folder(path)
    with explaining_a_full_disk(path), progress("steps", quiet=quiet) as tell:
        return write_export(asked, path, tell, on_resume=_say_resumed)


def _export_tables(
    run: Run,
    tables: tuple[str, ...],
    format: str,
    output: Path | None,
    series: tuple[str, ...],
    steps: slice | None,
    *,
    force: bool,
    quiet: bool,
) -> list[Path]:
    from sonde.show.export.parts import Parts
    from sonde.show.export.source import sources

    paths = _paths(run, output, tables, format)
    refuse_place(paths.values(), force=force)
    asked = sources(run, tables, series=series, steps=steps)
    if len(set(paths.values())) > 1:
        refuse_file_for_many(output, f"{len(tables)} tables", format, "choose a table with --what")
    else:
        require_folder(paths[tables[0]])
    if all(source.num_pieces == 1 for source in asked):
        with explaining_a_full_disk(paths[tables[0]]), _watched(asked, None, quiet=quiet) as watched:
            return _write(run, watched, paths, format)
    request = {"run": run.id, "tables": tables, "series": series, "steps": str(steps), "last_step": run.last_step}
    where = (
        next(iter(paths.values())) if format not in ONE_TABLE_PER_FILE or len(tables) == 1 else paths["stats"].parent
    )
    with explaining_a_full_disk(where), Parts(where, request).open() as parts:
        _say_resumed(parts.num_found)
        with _watched(asked, parts, quiet=quiet) as watched:
            return _write(run, watched, paths, format)


def _say_resumed(num_parts: int) -> None:
    if num_parts:
        remark(f"Goes on where it was: {num_parts} parts are there.")


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


def _write(run: Run, sources: list[Source], paths: dict[str, Path], format: str) -> list[Path]:
    from sonde.show.export.atomic import replacing
    from sonde.show.export.hdf5 import write_hdf5
    from sonde.show.export.json import write_json
    from sonde.show.export.source import run_facts
    from sonde.show.export.tables import write_table

    facts = run_facts(run)
    if format not in ONE_TABLE_PER_FILE:
        (path,) = set(paths.values())
        with replacing(path) as draft:
            (write_json if format == "json" else write_hdf5)(draft, sources, facts)
        return [path]
    for source in sources:
        path = paths[source.name]
        if len(paths) > 1:
            path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft:
            write_table(draft, format, source, facts)
    return list(paths.values())


@contextmanager
def _watched(sources: list[Source], parts: Parts | None, *, quiet: bool) -> Iterator[list[Source]]:
    """The same sources; a bar on stderr moves as they are read, and what was read is kept in parts."""
    from sonde.show.export.partial import kept
    from sonde.show.export.source import Source
    from sonde.show.progress import progress

    total, done = sum(source.num_pieces for source in sources), 0
    with progress("tables", quiet=quiet) as tell:

        def watched(source: Source) -> Source:
            def read(number: int) -> Any:
                nonlocal done
                piece = source.read(number)
                done += 1
                tell(done, total)
                return piece

            return Source(source.name, source.num_pieces, read)

        yield [watched(source if parts is None else kept(source, parts)) for source in sources]


def _report(files: list[dict[str, Any]]) -> None:
    for file in files:
        print(f"{plain(file['path'])}  {size(file['bytes'])}")
