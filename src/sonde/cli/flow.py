"""`sonde flow script.py:build_fn`: analyze how one batch flows through a model that a script builds."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import sysconfig
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
SHAPE: Final = "It must return (model, x, y, loss_fn), or a dict with these keys; y and loss_fn are optional."


def flow(
    target: Annotated[
        str,
        typer.Argument(metavar="SCRIPT:FUNCTION", help="A Python file, and the function in it that builds the model."),
    ],
    html: Annotated[Path | None, typer.Option("--html", help="Also write the report to this HTML file.")] = None,
    json: Json = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of micro-batches to split the batch into.")] = 1,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every issue and layer, not only the most severe.")
    ] = False,
    absolute: Annotated[
        bool,
        typer.Option("--absolute", help="Use absolute thresholds for pressures instead of ones relative to the loss."),
    ] = False,
) -> None:
    """Show how gradients flow through a model on one batch. The model is not trained.

    The function takes no arguments and returns (model, x, y, loss_fn), or a dict with these keys. Without a loss_fn,
    the model computes its own loss from y, passed as labels. The exit code is 1 if any issue is critical.

    \b
    Examples:
      sonde flow train.py:build
      sonde flow train.py:build --all
      sonde flow train.py:build --html flow.html
      sonde flow train.py:build --steps 4 --json
    """
    if html is not None and not html.resolve().parent.is_dir():  # fail before anything is computed
        raise UsageError(f'no folder "{html.parent}" to write {html.name} in. Create it first, or choose another path.')
    # The script's own output must not end up in the JSON.
    with redirect_stdout(sys.stderr if json else sys.stdout):
        report = _analyzed(target, steps, absolute)
    if html is not None:
        _save(report, html)
    print_json(report.as_dict()) if json else _print(report, show_all)
    if report.status == "CRITICAL" or any(issue.level >= "critical" for issue in report.issues):
        raise typer.Exit(1)


def _save(report: Any, html: Path) -> None:
    try:
        report.save_html(html)
    except OSError as error:  # an exit code of 1 would mean that an issue is critical
        raise UsageError(f"cannot write {html}: {error.strerror}.") from error
    remark(f"Wrote {html}.")


def _print(report: Any, show_all: bool) -> None:
    from sonde.show.flow.console import print_summary

    print_summary(report, limit=None if show_all else 5, more="--all")
    if show_all:
        print()
        report.print_layers()


def _analyzed(target: str, steps: int, absolute: bool) -> Any:
    from sonde.flow import ABSOLUTE, RELATIVE, analyze

    path, name = _split(target)
    old_path = sys.path[:]
    sys.path.insert(0, str(path.resolve().parent))  # the script can import modules from its own folder
    try:
        build = _function(path, name)
        parts = _parts(_run(build, f"{name}() in {path}"), name)
        thresholds = ABSOLUTE if absolute else RELATIVE
        return _run(lambda: analyze(*parts, steps=steps, thresholds=thresholds), "the analysis")
    finally:
        sys.path[:] = old_path


def _split(target: str) -> tuple[Path, str]:
    script, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise UsageError(
            f'"{target}" does not name a function. Name the one that builds the model:  sonde flow train.py:build'
        )
    if not Path(script).is_file():
        raise UsageError(f'no script "{script}". Give the path of a Python file.')
    return Path(script), name


def _function(path: Path, name: str) -> Callable[[], Any]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look for it there
    loader = spec.loader
    _run(lambda: loader.exec_module(module), str(path))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        own = [key for key in known if vars(module)[key].__module__ == module.__name__]
        there = nearest(name, known) or (f" Available: {', '.join(own[:8])}." if own else "")
        raise UsageError(f'no function "{name}" in {path}.{there}')
    build: Callable[[], Any] = function
    _refuse_arguments(build, name, path)
    return build


def _refuse_arguments(build: Callable[[], Any], name: str, path: Path) -> None:
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise UsageError(
            f"{name}() in {path} is called without arguments: {error}. Give each parameter a default, "
            "or name another function."
        ) from error
    except ValueError:
        return  # a builtin without a signature


def _run(function: Callable[[], Any], what: str) -> Any:
    """Call the user's code; report an error in it as one line with its location."""
    try:
        return function()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{what} failed: {type(error).__name__}: {error}{_where(error)}") from error


def _where(error: Exception) -> str:
    """The location of the last frame in the user's own code, if any: a line inside torch would not help."""
    libraries = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    ours = str(Path(__file__).parent.parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*libraries, ours, "<frozen")):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


def _parts(built: Any, name: str) -> list[Any]:
    if isinstance(built, Mapping):
        unknown = [str(key) for key in built if key not in PARTS]
        if unknown or not {"model", "x"} <= set(built):
            problem = f"has unknown keys: {', '.join(unknown)}" if unknown else "lacks model or x"
            raise UsageError(f"the dict returned by {name}() {problem}. {SHAPE}")
        return [built.get(part) for part in PARTS]
    if not isinstance(built, tuple | list) or not 2 <= len(built) <= 4:
        raise UsageError(f"{name}() returned {type(built).__name__}. {SHAPE}")
    return [*built, None, None][:4]
