"""`sonde delete RUN …`: move runs to the trash, or remove them for good. Never touches a run that is being written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sonde.cli.options import Dir, Json, open_run, runs_dir
from sonde.cli.output import print_json

if TYPE_CHECKING:
    from sonde.run import Run


def delete(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs: folders, ids, project/name.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    permanently: Annotated[bool, typer.Option("--permanently", help="Remove for good; not to the trash.")] = False,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Delete runs. They go to .trash in the folder of runs, from where `mv` brings them back.

    \b
    Examples:
      sonde delete 3f2a9c01
      sonde delete gpt/broken gpt/test --yes
      sonde delete latest --permanently
    """
    folder = runs_dir(dir)
    found = list({run.path: run for run in (open_run(name, dir) for name in names)}.values())
    for run in found:
        _refuse_running(run)
    if not yes:
        _ask(found, permanently)
    moved = []
    for run in found:
        target = _delete(run, folder, permanently)
        _mend_latest(folder)
        moved.append({"id": run.id, "path": str(run.path), "trash": None if target is None else str(target)})
    if json:
        print_json(moved)
    else:
        _report(moved)


def _refuse_running(run: Run) -> None:
    from sonde.errors import RunLockedError

    if run.status == "running":
        raise RunLockedError(f"run {run.id} ({run.project}/{run.name}) is running. Stop it first, then delete it.")


def _ask(runs: list[Run], permanently: bool) -> None:
    from sonde.errors import UsageError
    from sonde.show.term.text import plain

    for run in runs:
        typer.echo(f"{plain(run.project)}/{plain(run.name)}  {plain(run.id)}  {run.last_step + 1} steps", err=True)
    what = "Remove for good" if permanently else "Move to the trash"
    try:
        is_sure = typer.confirm(f"{what}: {len(runs)} run{'' if len(runs) == 1 else 's'}?", err=True)
    except typer.Abort:
        raise UsageError("delete asks before it deletes, and nobody answered. Add --yes.") from None
    if not is_sure:
        raise typer.Exit(1)


def _delete(run: Run, folder: Path, permanently: bool) -> Path | None:
    """Where the run is now; None when it is gone. It is moved away in one go, so that nobody sees half a run."""
    home = folder.resolve() if run.path.is_relative_to(folder.resolve()) else run.path.parent
    with _lock(run):
        target = _free_name(home, run.path.name)
        run.path.rename(target)
    if permanently:
        shutil.rmtree(target)
        _remove_if_empty(target.parent)
    if run.path.parent != home:
        _remove_if_empty(run.path.parent)
    return None if permanently else target


def _free_name(home: Path, name: str) -> Path:
    from sonde.schema.layout import TRASH_FOLDER

    trash = home / TRASH_FOLDER
    trash.mkdir(exist_ok=True)
    target, number = trash / name, 2
    while target.exists():
        target, number = trash / f"{name}-{number}", number + 1
    return target


@contextmanager
def _lock(run: Run) -> Iterator[None]:
    """Hold the writer's place, so that none can begin while the run is moved."""
    from sonde.errors import RunLockedError
    from sonde.schema.layout import LOCK_FILE

    try:
        import fcntl
    except ImportError:
        yield
        return
    path = run.path / LOCK_FILE
    if not path.is_file() or path.is_symlink():
        yield
        return
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLockedError(f"run {run.id} is in use by another process. Try again when it has ended.") from None
        yield


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _mend_latest(folder: Path) -> None:
    """`latest` points to the newest run that is left, or is gone with the last."""
    from sonde.run import runs
    from sonde.schema.layout import LATEST_LINK, RUN_FILE

    link = folder / LATEST_LINK
    if not link.is_symlink() or (link / RUN_FILE).is_file():
        return
    left = runs(folder)
    link.unlink()
    if left:
        link.symlink_to(os.path.relpath(left[0].path, folder.resolve()), target_is_directory=True)


def _report(moved: list[dict[str, str | None]]) -> None:
    from sonde.show.term.text import plain

    for entry in moved:
        if entry["trash"] is None:
            print(f"deleted {plain(entry['path'])}")
        else:
            print(f"moved {plain(entry['path'])} to the trash. To bring it back:")
            print(f"  mv {plain(entry['trash'])} {plain(entry['path'])}")
