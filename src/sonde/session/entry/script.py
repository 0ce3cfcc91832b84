"""`sonde run train.py …`: an unmodified script, with every model it trains watched."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from sonde.errors import RunError, UsageError
from sonde.session.entry import current
from sonde.session.entry.command import CommandLine
from sonde.session.null import NullSession
from sonde.session.process.ending import print_line, status_of
from sonde.session.session import Session


def run_script(script: str, argv: list[str], *, is_module: bool = False, **options: Any) -> int:
    """Run a script as `python script` would, recorded. Gives back the exit code the script would have had.

    A run begins when the script begins one, else with the first model that it trains. `options` are those of `init`
    that the command line names: they win over what the script says.
    """
    if not is_module and not Path(script).is_file():
        raise UsageError(f'no script "{script}". Give the path of a Python file, or -m and a module.')
    recording = _Recording(script.rpartition(".")[2] if is_module else Path(script).stem, options)
    error: BaseException | None = None
    old_argv, old_path = sys.argv, sys.path[:]
    try:
        sys.argv = [script, *argv]
        sys.path[0:0] = [str(Path.cwd() if is_module else Path(script).resolve().parent)]
        _execute(script, is_module)
    except BaseException as raised:  # noqa: BLE001 - every ending is told, then becomes the exit code
        error = raised
    finally:
        sys.argv, sys.path[:] = old_argv, old_path
        recording.end(error)
    return _exit_code(error)


def _not_recorded(_: str, error: Exception) -> None:
    print_line(f"sonde: warning: the script is not recorded: {error}")


class _Recording:
    """The sessions of a script: those it begins itself, or else one that begins with its first model."""

    def __init__(self, default_project: str, options: dict[str, Any]) -> None:
        from sonde.session.entry.automatic import FirstModel

        command = CommandLine(default_project, options)
        self._pid = os.getpid()
        self._has_begun = False
        self._search = FirstModel(self._first_model, _not_recorded)
        current.use_command(command, self._begun)

    def _first_model(self, module: Any, args: Any) -> None:
        """Nothing has begun a run, and a model is about to be called for training."""
        if os.getpid() != self._pid:
            return  # in a forked child: the run would be a second one
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

    def end(self, error: BaseException | None) -> None:
        """Also of a script that never trained a model: how it ended is worth knowing."""
        self._search.detach()
        try:
            session = current.active_session() if self._has_begun else current.init()
        except RunError as failure:
            _not_recorded("", failure)
            session = None
        finally:
            current.use_command(None)
        if session is not None:
            session.finish(*status_of(error))


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
