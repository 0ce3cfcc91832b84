"""`sonde flow script.py:build_fn`: one batch through a model that a script builds, analysed."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from sonde.cli.options import Json
from sonde.cli.output import print_json, remark
from sonde.errors import UsageError, nearest

PARTS: Final = ("model", "x", "y", "loss_fn")
SHAPE: Final = "It returns (model, x, y, loss_fn), or a dict of these; y and loss_fn may be left out."


def flow(
    target: Annotated[
        str, typer.Argument(metavar="SCRIPT:FUNCTION", help="A Python file, and the function in it that builds.")
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Also write the report as one HTML file.")] = None,
    json: Json = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Into how many parts to cut the batch.")] = 1,
) -> None:
    """Analyse the flow of gradients through a model, on one batch. The model is not trained.

    The function takes no arguments and returns (model, x, y, loss_fn), or a dict of these. Without a loss_fn the model
    computes its own, given y as labels. The exit code is 1 if anything is critical.

    \b
    Examples:
      sonde flow train.py:build
      sonde flow train.py:build --html flow.html
      sonde flow train.py:build --steps 4 --json
    """
    # What a script prints must not get into the JSON.
    with redirect_stdout(sys.stderr if json else sys.stdout):
        report = _analyzed(target, steps)
    if html is not None:
        report.save_html(html)
        remark(f"wrote {html}")
    print_json(report.as_dict()) if json else report.print_summary()
    if report.status == "CRITICAL" or report.get_issues_by_severity("CRITICAL"):
        raise typer.Exit(1)


def _analyzed(target: str, steps: int) -> Any:
    from sonde.flow import analyze

    path, name = _split(target)
    old_path = sys.path[:]
    sys.path.insert(0, str(path.resolve().parent))  # a script finds its neighbours
    try:
        build = _function(path, name)
        parts = _parts(_run(build, f"{name}() in {path}"), name)
        return _run(lambda: analyze(*parts, steps=steps), "the analysis")
    finally:
        sys.path[:] = old_path


def _split(target: str) -> tuple[Path, str]:
    script, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(f'"{target}" names no function. Say which one builds the model:  sonde flow train.py:build')
    if not Path(script).is_file():
        raise UsageError(f'no script "{script}". Give the path of a Python file.')
    return Path(script), name


def _function(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look for it there
    loader = spec.loader
    _run(lambda: loader.exec_module(module), str(path))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f'no function "{name}" in {path}.{nearest(name, known)}')
    build: Callable[[], Any] = function
    return build


def _run(function: Callable[[], Any], what: str) -> Any:
    """The user's code: an error in it is theirs, and told as one line that says where."""
    try:
        return function()
    except UsageError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        raise UsageError(f"{what} failed: {type(error).__name__}: {error} ({where})") from error


def _parts(built: Any, name: str) -> list[Any]:
    if isinstance(built, Mapping):
        unknown = [str(key) for key in built if key not in PARTS]
        if unknown or not {"model", "x"} <= set(built):
            told = f"has {', '.join(unknown)}" if unknown else "lacks model or x"
            raise UsageError(f"what {name}() returned {told}. {SHAPE}")
        return [built.get(part) for part in PARTS]
    if not isinstance(built, tuple | list) or not 2 <= len(built) <= 4:
        raise UsageError(f"{name}() returned {type(built).__name__}. {SHAPE}")
    return [*built, None, None][:4]
