"""Creates run folders and finds runs to resume. No name, however hostile, leads out of the folder of runs."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from sonde.errors import RunError, SondeError
from sonde.schema.layout import LATEST_LINK, RUN_FILE, STREAMS, TRASH_FOLDER, UNSHARDED_VERSION, rank_folder
from sonde.schema.records import to_json
from sonde.write.durable import TMP_SUFFIX, make_folder, sync_folder
from sonde.write.environment import describe_machine
from sonde.write.runfile import RunFile
from sonde.write.secrets import mask_command, mask_config

MAX_NAME_BYTES: Final = 80
_UNSAFE: Final = re.compile(r"[^\w.+=-]")
_RESERVED: Final = frozenset({LATEST_LINK, TRASH_FOLDER})


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path: a program may change its working directory later.

    >>> absolute("/data/runs").as_posix()
    '/data/runs'
    """
    try:
        return Path(path).absolute()
    except OSError as error:
        raise RunError(
            f"cannot find the folder {path}: the working directory no longer exists ({error.strerror}). "
            "Change to an existing directory, or pass an absolute path with dir= or SONDE_DIR."
        ) from error


def create_run(
    dir: Path,
    *,
    project: str,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    command: Sequence[str] | None = None,
    mask_secrets: bool = True,
) -> Path:
    """Create `<dir>/<project>/<time>-<name>/` with its run.json, and let `<dir>/latest` point to it.

    A secret that was written once may be copied anywhere, so it is masked before it is written.
    """
    created_time = time.time()
    id = secrets.token_hex(4)
    dir = absolute(dir)
    config, command = dict(config or {}), [str(part) for part in (sys.argv if command is None else command)]
    if mask_secrets:
        # As it is stored: a secret may be inside an object, and a config may contain itself.
        config, command = mask_config(json.loads(to_json(config))), mask_command(command)
    try:
        run = _make_folder(dir, folder_name(project, "default"), created_time, folder_name(name or id, id))
        content = _first_content(project, name or id, id, created_time, config, tags, notes, command)
        for stream in STREAMS:
            make_folder(run / stream)
        RunFile(run, content).write()
        sync_folder(run.parent)
    except OSError as error:
        raise RunError(_explain(dir, error)) from error
    _point_latest(dir, run)
    return run


def create_rank(run: Path, rank: int) -> Path:
    """The folder of a rank that holds shards, inside the run of the first rank; the one of an earlier process of this
    rank is continued."""
    folder = rank_folder(run, rank)
    if (folder / RUN_FILE).exists():
        return folder
    first = RunFile.load(run).content
    try:
        for stream in STREAMS:
            make_folder(folder / stream)
        content = _first_content(first["project"], first["name"], first["id"], time.time(), {}, (), "", ())
        RunFile(folder, content | {"rank": rank}).write()
        sync_folder(folder.parent)
    except OSError as error:
        raise RunError(_explain(run, error)) from error
    return folder


def check_place(dir: Path) -> None:
    """Raise the error that `create_run` would raise here, as far as that can be known without creating anything."""
    found = next(parent for parent in (dir, *dir.parents) if parent.exists())
    if not found.is_dir():
        raise RunError(_explain(dir, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))))
    if not os.access(found, os.W_OK | os.X_OK):
        raise RunError(_explain(dir, PermissionError(errno.EACCES, os.strerror(errno.EACCES))))


def remove_run(run: Path) -> None:
    """Delete a run that its own process started and recorded nothing in, and the folders that are empty then.

    If that fails, an empty run stays.
    """
    shutil.rmtree(run, ignore_errors=True)
    dir = run.parent.parent
    with contextlib.suppress(OSError):
        run.parent.rmdir()  # refuses unless empty
    with contextlib.suppress(OSError):
        if not (dir / LATEST_LINK).exists():
            others = [path.parent for path in dir.glob(f"*/*/{RUN_FILE}")]
            if others:
                _point_latest(dir, max(others, key=lambda path: path.name))
            else:
                (dir / LATEST_LINK).unlink(missing_ok=True)
        dir.rmdir()


def find_resumable(dir: Path, *, project: str, name: str | None = None) -> Path | None:
    """The newest run of that project, or of that name in it; an id or a folder name is found in any project.

    The lock shows whether another process still writes it: skipping such a run would resume an older one instead.
    """
    own = Path(dir) / folder_name(project, "default")
    found, foreign = [], []
    for path in Path(dir).glob(f"*/*/{RUN_FILE}"):
        try:
            content = RunFile.load(path.parent).content
        except SondeError:
            continue
        entry = _number(content.get("created_time")), path.parent.name, path.parent
        is_own = path.parent.parent == own and content.get("project") == _text(project)
        if is_own and (name is None or content.get("name") == _text(name)):
            found.append(entry)
        if name is not None and name in (content.get("id"), path.parent.name):
            foreign.append(entry)
    newest = max(found or foreign, default=None)
    return None if newest is None else newest[2]


def folder_name(name: str, empty: str) -> str:
    """A name as one path component. A name that had to be changed ends in a hash, so that two names never share a
    folder.

    >>> folder_name("gpt-2", "default")
    'gpt-2'
    >>> folder_name("../../etc", "default").startswith("etc-")
    True
    """
    if not name:
        return empty
    safe = _UNSAFE.sub("_", name).lstrip("._-")
    safe = safe.encode()[:MAX_NAME_BYTES].decode("utf-8", "ignore")
    if safe == name and safe.lower() not in _RESERVED:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe or empty}-{digest}"


def _make_folder(dir: Path, project: str, created_time: float, name: str) -> Path:
    parent = dir / project
    make_folder(parent)
    stem = f"{datetime.fromtimestamp(created_time, UTC):%Y%m%d-%H%M%S}-{name}"
    for attempt in range(1, 10_000):
        run = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            run.mkdir()
        except FileExistsError:
            continue
        return run
    raise OSError(errno.EEXIST, "ten thousand runs started in the same second", str(parent))


def _first_content(
    project: str,
    name: str,
    id: str,
    created_time: float,
    config: Mapping[str, Any],
    tags: Sequence[str],
    notes: str,
    command: Sequence[str],
) -> dict[str, Any]:
    return {
        "format": UNSHARDED_VERSION,
        "id": id,
        "name": _text(name),
        "project": _text(project),
        "created": datetime.fromtimestamp(created_time, UTC).isoformat(),
        "created_time": created_time,
        "config": config,
        "tags": [str(tag) for tag in tags],
        "notes": str(notes),
        "command": command,
        "environment": describe_machine(),
        "git": None,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": _from_environment("RANK", 0),
        "world_size": _from_environment("WORLD_SIZE", 1),
        "status": "running",
        "reason": "",
        "ended_time": None,
        "heartbeat": {
            "time": created_time,
            "step": -1,
            "acknowledged": dict.fromkeys(STREAMS, -1),
            "dropped": dict.fromkeys(STREAMS, 0),
            "failed": dict.fromkeys(STREAMS, 0),
            "degraded": "",
        },
        "facts": {},
    }


def _point_latest(dir: Path, run: Path) -> None:
    """Move the link atomically. A folder of runs without one is not an error."""
    link = dir / LATEST_LINK
    tmp = dir / f".{LATEST_LINK}-{os.getpid()}-{secrets.token_hex(4)}{TMP_SUFFIX}"
    target = run.relative_to(dir)
    try:
        try:
            tmp.symlink_to(target, target_is_directory=True)
        except (OSError, NotImplementedError):
            tmp.write_text(f"{target.as_posix()}\n", encoding="utf-8")
        tmp.replace(link)
    except OSError:
        with contextlib.suppress(OSError):
            tmp.unlink(missing_ok=True)


def _explain(dir: Path, error: OSError) -> str:
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        remedy = "The folder is not writable; choose another one with dir= or SONDE_DIR."
    elif error.errno in (errno.ENOTDIR, errno.EEXIST):
        remedy = "A file is in the way; choose another folder with dir= or SONDE_DIR."
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        remedy = "This process has too many files open; close some, or raise the limit:  ulimit -n 65536"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "The disk is full; free some space, or choose another folder with dir= or SONDE_DIR."
    else:
        remedy = "Choose another folder with dir= or SONDE_DIR."
    return f"cannot create a run in {dir}: {error.strerror or error}. {remedy}"


def _text(text: str) -> str:
    """The value as it will be read back from run.json."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _from_environment(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else default
