"""The exit code of the program: the last argument of `sys.exit`, if that call ended the program.

An exit leaves no exception behind, and Python has forgotten its code when it calls `atexit`. An exit that does not use
`sys.exit` (`raise SystemExit(3)`) is recorded a moment later by the C library: see `sonde.write.ending`.
"""

from __future__ import annotations

import atexit
import functools
import opcode
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NoReturn

_NONE: Final = object()


class Exits:
    """Wraps `sys.exit` while a session is open, and restores it afterwards."""

    def __init__(self) -> None:
        self._code: Any = _NONE
        self._num_sessions = 0
        self._main: FrameType | None = None
        self._theirs: Any = None
        self._ours: Any = None

    def follow(self, at_end: Callable[[], None]) -> None:
        """Register a session; `at_end` is called if the process ends while the session is open."""
        _call_at_end(at_end)
        self._num_sessions += 1
        if self._num_sessions > 1:
            return
        self._code, self._main = _NONE, _outermost_frame()
        theirs = self._theirs = sys.exit  # a local: our function may outlive this session, and `_theirs` changes

        @functools.wraps(sys.exit)
        def exit(status: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():  # another thread ends only itself
                self._code = status
            theirs(status)
            raise SystemExit(status)

        self._ours = sys.exit = exit

    def leave(self, at_end: Callable[[], None]) -> None:
        """Unregister a session that is over."""
        atexit.unregister(at_end)
        self._num_sessions = max(self._num_sessions - 1, 0)
        if self._num_sessions:
            return
        if sys.exit is self._ours:  # other code may have wrapped ours since
            sys.exit = self._theirs
        self._ours, self._main = None, None

    def last(self) -> SystemExit | None:
        """The exit that ended the program; None if it reached its last line, or ended in a way we did not see."""
        if self._code is _NONE or not _is_left_by_exception(self._main):
            return None
        return SystemExit(self._code)


def _outermost_frame() -> FrameType | None:
    """The outermost frame of the main thread: the code of the script. It holds no more than the script's globals."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_left_by_exception(frame: FrameType | None) -> bool:
    """Whether a frame did not reach its return. An exit that was caught did not end it."""
    if frame is None:
        return True
    done = frame.f_code.co_code[frame.f_lasti] if frame.f_lasti >= 0 else 0
    return not opcode.opname[done].startswith("RETURN")


def _call_at_end(method: Callable[[], None]) -> None:
    """Call this when the process ends. A multiprocessing child never gets as far as `atexit`."""
    atexit.register(method)
    processes: Any = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        ref = weakref.WeakMethod(method)
        Finalize(None, lambda: _call(ref), exitpriority=0)


def _call(ref: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = ref()
    if method is not None:
        method()


exits: Final = Exits()
"""The exits of this process."""
