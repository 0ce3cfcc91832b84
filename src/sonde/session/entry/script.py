"""`sonde run train.py …`: runs an unmodified script and watches every model it trains."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from sonde.display import print_line
from sonde.errors import UsageError
from sonde.session.entry import current
from sonde.session.entry.command import CommandLine
from sonde.session.null import NullSession
from sonde.session.process.ending import status_of
from sonde.session.session import Session


def run_script(script: str, argv: list[str], *, is_module: bool = False, **options: Any) -> int:
    """Run a script as `python script` would, and record it. Returns the exit code the script would have had.

    A run starts when the script starts one, or else with the first model that it trains; a script that does neither
    leaves no run. `options` are the `init` arguments given on the command line: they take precedence over the script's.
    """
    if not is_module and not Path(script).is_file():
        raise UsageError(f'no script "{script}". Pass the path of a Python file, or -m and a module.')
    recording = _Recording(script.rpartition(".")[2] if is_module else Path(script).stem, options)
    error: BaseException | None = None
    old_argv, old_path = sys.argv, sys.path[:]
    try:
        sys.argv = [script, *argv]
        sys.path[0:0] = [str(Path.cwd() if is_module else Path(script).resolve().parent)]
        _execute(script, is_module)
    except BaseException as raised:  # noqa: BLE001 - every ending is reported, then becomes the exit code
        error = raised
    finally:
        sys.argv, sys.path[:] = old_argv, old_path
        has_recorded = recording.end(error)
    trace = _script_frames(error)
    if is_module and trace is None and isinstance(error, ImportError):
        raise UsageError(f"cannot run -m {script}: {error}. Check the name and the working directory.") from None
    code = _exit_code(error, trace)
    if not has_recorded:
        print_line(f"sonde: {_why_nothing(script, error)} No run was kept.")
    return code


def _not_recorded(_: str, error: Exception) -> None:
    print_line(f"sonde: warning: the script is not recorded: {error}")


class _Recording:
    """The sessions of a script: those it starts itself, or else one that starts with its first model."""

    def __init__(self, default_project: str, options: dict[str, Any]) -> None:
        from sonde.session.entry.automatic import FirstModel

        command = CommandLine(default_project, options)
        self._pid = os.getpid()
        self._has_begun = False
        self._search = FirstModel(self._first_model, _not_recorded)
        current.use_command(command, self._begun)

    def _first_model(self, module: Any, args: Any) -> None:
        """Called when no run has started and a model is about to be called for training."""
        if os.getpid() != self._pid:
            return  # a forked child would start a second run
        from sonde.session.entry.automatic import automatic_of

        session = current.begin_unclaimed()
        automatic = automatic_of(session) if isinstance(session, Session) else None
        if automatic is not None:
            automatic.seen(module, args)
        else:
            session.watch(module)

    def _begun(self, session: Session | NullSession) -> None:
        from sonde.session.entry.automatic import Automatic

        self._has_begun = True
        self._search.detach()
        if isinstance(session, Session):
            Automatic(session)

    def end(self, error: BaseException | None) -> bool:
        """Finish the run. Returns whether there is one: a run in which nothing was trained is removed."""
        self._search.detach()
        is_empty = current.discard_empty()
        session = current.active_session()
        current.use_command(None)
        if session is not None and self._has_begun:
            session.finish(*status_of(error))
        return self._has_begun and not is_empty


def _execute(script: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _script_frames(error: BaseException | None) -> TracebackType | None:
    """The script's own frames of a traceback; None if its code never ran."""
    trace = None if error is None else error.__traceback__
    while trace is not None and "runpy" not in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    while trace is not None and "runpy" in trace.tb_frame.f_code.co_filename:
        trace = trace.tb_next
    return trace


def _why_nothing(script: str, error: BaseException | None) -> str:
    if error is None or status_of(error)[0] == "finished":
        return f"Nothing was recorded: {script} trained no model."
    return f"Nothing was recorded: {script} ended before it trained a model."


def _exit_code(error: BaseException | None, trace: TracebackType | None) -> int:
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return int(error.code or 0)
        print(error.code, file=sys.stderr)
        return 1
    traceback.print_exception(type(error), error, trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
