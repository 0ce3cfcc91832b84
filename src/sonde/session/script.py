"""`sonde run train.py …`: an unmodified script, with every model it trains watched."""

from __future__ import annotations

import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from sonde.errors import UsageError
from sonde.session import current
from sonde.session.ending import status_of
from sonde.session.session import Session


def run_script(script: str, argv: list[str], *, is_module: bool = False, **options: Any) -> int:
    """Run a script as `python script` would, recorded. Gives back the exit code the script would have had."""
    if not is_module and not Path(script).is_file():
        raise UsageError(f'no script "{script}". Give the path of a Python file, or -m and a module.')
    options.setdefault("project", script.rpartition(".")[2] if is_module else Path(script).stem)
    session = current.init(**options)
    current.set_scripted(True)
    error: BaseException | None = None
    old_argv, old_path = sys.argv, sys.path[:]
    try:
        if isinstance(session, Session):
            from sonde.session.automatic import Automatic

            Automatic(session)
        sys.argv = [script, *argv]
        sys.path[0:0] = [str(Path.cwd() if is_module else Path(script).resolve().parent)]
        _execute(script, is_module)
    except BaseException as raised:  # noqa: BLE001 - every ending is told, then becomes the exit code
        error = raised
    finally:
        sys.argv, sys.path[:] = old_argv, old_path
        current.set_scripted(False)
        status, reason = status_of(error)
        session.finish(status, reason)
    return _exit_code(error)


def _execute(script: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0)
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace is not None and "runpy" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    while trace is not None and "runpy" in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next  # only the script's own frames are the user's business
    traceback.print_exception(type(error), error, trace or error.__traceback__)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
