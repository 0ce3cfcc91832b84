"""Exports the tables or the whole tensors of a run to files for other programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, get_args

from sonde.errors import UnknownNameError, UsageError
from sonde.run import Run, Steps, step_slice
from sonde.show.export.atomic import replacing
from sonde.show.export.parts import Parts, kept
from sonde.show.export.place import (
    choose_format,
    explaining_a_full_disk,
    refuse_file_for_many,
    refuse_place,
    require_folder,
)
from sonde.show.export.source import TABLES, Scalars, Source, run_facts, sources
from sonde.show.export.tables import write_hdf5, write_json, write_table
from sonde.show.export.tensors import FORMATS, KINDS, default_path, is_folder, plan_export, write_export
from sonde.show.term.progress import progress

ENDINGS: Final = {"csv": "csv", "parquet": "parquet", "arrow": "arrow", "json": "json", "hdf5": "h5"}
ONE_TABLE_PER_FILE: Final = ("csv", "parquet", "arrow")
OnResume = Callable[[int], None]
Shape = Literal["long", "wide"]


def check_export(
    what: str, format: str | None, output: Path | None, *, shape: str = "long", internal: bool = False
) -> str:
    """The format of an export, or an error if there is no such table, kind, format or shape."""
    if what not in (*TABLES, *KINDS, "all"):
        raise UnknownNameError("table or kind of tensors", what, (*TABLES, *KINDS, "all"))
    _refuse_shape(what, shape, internal=internal)
    known, default = (FORMATS, "safetensors") if what in KINDS else (ENDINGS, "parquet")
    chosen = choose_format(what, format, output, known, default)
    if chosen == "hdf5":
        if shape == "wide":
            raise UsageError("HDF5 stores each scalar on its own, so it has no wide shape. Choose another format=.")
        from sonde.schema.snapshots.exported import require_h5py

        require_h5py()
    return chosen


def _refuse_shape(what: str, shape: str, *, internal: bool) -> None:
    if shape not in get_args(Shape):
        raise UnknownNameError("shape", shape, get_args(Shape))
    if what != "scalars" and (shape == "wide" or internal):
        raise UsageError(f"{'internal=' if internal else 'shape='} works only if what= is scalars.")


def export_run(
    run: Run,
    what: str = "all",
    *,
    format: str | None = None,
    output: str | os.PathLike[str] | None = None,
    steps: Steps = None,
    series: str | Sequence[str] | None = None,
    internal: bool = False,
    shape: Shape = "long",
    force: bool = False,
    quiet: bool = True,
    on_resume: OnResume = lambda _: None,
) -> list[Path]:
    """Export like `sonde export`, and return the files: tables (`stats`, `scalars`, …, or "all") or whole tensors
    (`weights`, `gradients`, …).

    Of scalars, it exports those that you logged: `internal` adds those that sonde recorded for its rules, and `shape`
    "wide" gives one row per step.

    sonde.show.export_run(run, "scalars", output="loss.csv")
    sonde.show.export_run(run, "weights", steps="-1:", output="model.safetensors")
    """
    path = None if output is None else Path(output)
    chosen = check_export(what, format, path, shape=shape, internal=internal)
    asked = (series,) if isinstance(series, str) else tuple(series or ())
    names = asked or ("*",)
    span = step_slice(steps)
    if what in KINDS:
        return _export_tensors(run, what, chosen, path, names, span, force=force, quiet=quiet, on_resume=on_resume)
    tables = TABLES if what == "all" else (what,)
    scalars = Scalars(patterns=("*",) if what == "all" or internal else asked, is_wide=shape == "wide")
    return _export_tables(
        run, tables, chosen, path, names, scalars, span, force=force, quiet=quiet, on_resume=on_resume
    )


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
    on_resume: OnResume,
) -> list[Path]:
    asked = plan_export(run, what, format, names=names, steps=steps)
    path = output or default_path(asked)
    if is_folder(asked):
        refuse_file_for_many(output, f"{len(asked.steps)} steps", format, "choose a step with steps=")
    refuse_place([path], force=force, may_be_folder=is_folder(asked))
    require_folder(path)
    with explaining_a_full_disk(path), progress("steps", quiet=quiet) as advance:
        return write_export(asked, path, advance, on_resume=on_resume)


def _export_tables(
    run: Run,
    tables: tuple[str, ...],
    format: str,
    output: Path | None,
    series: tuple[str, ...],
    scalars: Scalars,
    steps: slice | None,
    *,
    force: bool,
    quiet: bool,
    on_resume: OnResume,
) -> list[Path]:
    paths = _paths(run, output, tables, format)
    refuse_place(paths.values(), force=force)
    asked = sources(run, tables, series=series, scalars=scalars, steps=steps)
    if len(set(paths.values())) > 1:
        refuse_file_for_many(output, f"{len(tables)} tables", format, "choose a table with what=")
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
        on_resume(parts.num_found)
        with _watched(asked, parts, quiet=quiet) as watched:
            return _write(run, watched, paths, format)


def _paths(run: Run, output: Path | None, tables: tuple[str, ...], format: str) -> dict[str, Path]:
    """The path of each table; a format that holds them all has one path for all."""
    ending = ENDINGS[format]
    if format in ONE_TABLE_PER_FILE and len(tables) > 1:
        folder = output or Path(run.path.name)
        return {table: folder / f"{table}.{ending}" for table in tables}
    label = tables[0] if len(tables) == 1 else "all"
    path = output or Path(f"{run.path.name}-{label}.{ending}")
    return dict.fromkeys(tables, path)


def _write(run: Run, sources: list[Source], paths: dict[str, Path], format: str) -> list[Path]:
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
    """The same sources, with a progress bar on stderr; pieces that were read are kept in `parts`."""

    total, done = sum(source.num_pieces for source in sources), 0
    with progress("tables", quiet=quiet) as advance:

        def watched(source: Source) -> Source:
            def read(number: int) -> Any:
                nonlocal done
                piece = source.read(number)
                done += 1
                advance(done, total)
                return piece

            return Source(source.name, source.num_pieces, read)

        yield [watched(source if parts is None else kept(source, parts)) for source in sources]
