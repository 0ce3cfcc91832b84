"""Records the end of a run before the disk has synced, and after Python has exited.

A disk may take longer than a program can wait at its end. `announce_ending` writes a small file that is visible at
once; it is removed when run.json has the same status. Only the C library knows the exit code of a program that did not
call `sys.exit`; `leave_exit_code` makes it write that code into the run folder.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from sonde.schema.layout import ENDING_FILE, EXIT_CODE_FILE, RunStatus
from sonde.schema.records import sign_document, to_json
from sonde.write.durable import TMP_SUFFIX, open_file

_UNBUFFERED = 2


def announce_ending(run: Path, status: RunStatus, reason: str) -> None:
    """Write status and reason without a sync: visible at once, lost only if the machine loses power."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
    text = sign_document(to_json({"status": status, "reason": reason, **who}))
    draft = run / f"{ENDING_FILE}{TMP_SUFFIX}"
    with contextlib.suppress(OSError):  # a full disk or a missing folder: run.json may still be written
        draft.write_text(text, encoding="utf-8")
        draft.replace(run / ENDING_FILE)


def forget_endings(run: Path) -> None:
    """Remove the file of an earlier writer, or one that run.json has replaced."""
    for name in (ENDING_FILE, EXIT_CODE_FILE):
        with contextlib.suppress(OSError):
            (run / name).unlink(missing_ok=True)


def leave_exit_code(run: Path) -> bool:
    """Have the C library write the exit code of this process to the run after Python has exited. Call it while the
    process ends. Returns False with a C library other than glibc."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        on_exit, write_byte, fdopen, set_buffer = libc.on_exit, libc.fputc, libc.fdopen, libc.setvbuf
    except (ImportError, OSError, AttributeError):
        return False
    fdopen.restype = ctypes.c_void_p
    try:
        fd = open_file(run / EXIT_CODE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except OSError:
        return False
    address = fdopen(fd, b"w")
    if not address:
        os.close(fd)
        return False
    file = ctypes.c_void_p(address)
    set_buffer(file, None, _UNBUFFERED, ctypes.c_size_t(0))
    # exit(code) calls the on_exit function with (code, argument), which is the signature of fputc(byte, file).
    return bool(on_exit(ctypes.cast(write_byte, ctypes.c_void_p), file) == 0)
