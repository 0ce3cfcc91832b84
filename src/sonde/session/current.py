"""The session of this process, and the functions that act on it: `sonde.init`, `sonde.watch`, `sonde.log` and so on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sonde.config import Settings
from sonde.errors import RunNotFoundError, SessionError
from sonde.probe.schedule import ALWAYS
from sonde.record.folder import create_run, find_resumable
from sonde.record.ranks import announce, rank, world_size
from sonde.session.null import NullSession
from sonde.session.session import DEFAULT_ACTIVATIONS, DEFAULT_INSPECT, Session

_current: Session | NullSession | None = None
_scripted = False
"""A session begun by `sonde run` belongs to the command line: the script's own `init` joins it."""


def init(
    project: str | None = None,
    name: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    resume: bool | str = False,
    **settings: Any,
) -> Session | NullSession:
    """Begin a run. `resume=True` goes on with the newest interrupted run of the project; a name or path, with that one.

    session = sonde.init(project="gpt", name="baseline", config={"lr": 3e-4})
    """
    global _current
    given = {key: value for key, value in {"project": project, "dir": dir, **settings}.items() if value is not None}
    loaded = Settings.load(**given)
    if isinstance(_current, Session) and not _current.is_finished:
        if _scripted:
            _join(_current, config, tags, notes)
            return _current
        _current.warn("a new session begins; the one before it is finished.")
        _current.finish()
    _current = begin(loaded, name=name, config=config, tags=tags, notes=notes, resume=resume)
    return _current


def begin(
    settings: Settings,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    resume: bool | str = False,
) -> Session | NullSession:
    """A session of its own, beside the one of this process. Only the first rank of a distributed job records all; the
    others tell it where a value stopped being finite."""
    if settings.mode == "disabled":
        return NullSession()
    if rank() != 0:
        from sonde.session.other_rank import RankSession

        return RankSession(settings)
    found = _find(resume, settings, name) if resume else None
    path = found or create_run(
        Path(settings.dir), project=settings.project, name=name, config=config, tags=tags, notes=notes
    )
    session = Session(path, settings, resume=found is not None)
    if world_size() > 1:
        note = announce(Path(settings.dir), path)
        session.on_finish(partial(note.unlink, missing_ok=True))
    return session


def _find(resume: bool | str, settings: Settings, name: str | None) -> Path | None:
    if isinstance(resume, bool):
        return find_resumable(Path(settings.dir), project=settings.project, name=name)
    if Path(resume).is_dir():
        return Path(resume)
    project, _, wanted = resume.rpartition("/")
    found = find_resumable(Path(settings.dir), project=project or settings.project, name=wanted)
    if found is None:
        raise RunNotFoundError(f'no run "{resume}" to resume under {settings.dir}. `sonde list` shows what is there.')
    return found


def _join(session: Session, config: Mapping[str, Any] | None, tags: Sequence[str], notes: str) -> None:
    session.writer.note(script={"config": dict(config or {}), "tags": list(tags), "notes": notes})


def watch(
    model: Any,
    optimizer: Any = None,
    *,
    params: Any = True,
    grads: Any = True,
    updates: Any = True,
    optim: Any = True,
    activations: Any = DEFAULT_ACTIVATIONS,
    activation_grads: Any = False,
    inspect: Any = DEFAULT_INSPECT,
    sites: Any = "*",
    when: Any = ALWAYS,
    budget: Any = ...,
    snapshots: Any = None,
    mirror: Any = None,
    prefix: str = "",
    **others: Any,
) -> Session | NullSession:
    """Record what happens inside a model while it trains; begins a run if there is none.

    Each kind takes True, False, a schedule such as `every(10)`, or a function of the step. `sites` is a glob, a list of
    globs and module types, or a function of name and module. With no optimizer named, any that steps this model's
    parameters is followed. `budget` is the share of a step's time to spend; left out, it is the setting's. `mirror`
    forwards chosen numbers and all findings to "wandb", "tensorboard", "mlflow" or "trackio". The keywords of
    `wandb.watch`, `log=` and `log_freq=`, are understood.

    with sonde.watch(model, optimizer):
        train()
    """
    session = _current
    if session is None or session.is_finished:
        session = init()
    return session.watch(
        model,
        optimizer,
        params=params,
        grads=grads,
        updates=updates,
        optim=optim,
        activations=activations,
        activation_grads=activation_grads,
        inspect=inspect,
        sites=sites,
        when=when,
        budget=budget,
        snapshots=snapshots,
        mirror=mirror,
        prefix=prefix,
        **others,
    )


def active_session() -> Session | NullSession | None:
    """The session of this process, unless it is finished or none was begun."""
    return None if _current is None or _current.is_finished else _current


def _active() -> Session | NullSession:
    if _current is None:
        raise SessionError("no session. Begin one first:  sonde.init(project=...)  or  sonde.watch(model)")
    return _current


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record numbers at this step: `sonde.log({"loss": loss})`. Tensors are taken without waiting for the device."""
    _active().log(values, step)


def step() -> None:
    """End the step, in a loop without a watched optimizer; where one is watched, its own steps count."""
    _active().step()


def batch(inputs: Any, targets: Any = None, *, ids: Any = None) -> None:
    """Tell which batch comes next: `sonde.batch(x, y)`, or with the names of its samples `sonde.batch(x, y, ids=ids)`.

    Gives the batch an identity, so that one that comes back is known. Nothing is waited for.
    """
    _active().batch(inputs, targets, ids=ids)


def snapshot(kinds: Any = None) -> int | None:
    """Keep whole tensors of the next step: `sonde.snapshot()`, or `sonde.snapshot(("param", "grad"))`. Its number."""
    return _active().snapshot(kinds)


def tap(name: str, tensor: Any) -> None:
    """Record the sketch of any tensor: `sonde.tap("logits", logits)`."""
    _active().tap(name, tensor)


def finish() -> None:
    """End the run: write everything, remove every hook."""
    if _current is not None:
        _current.finish()


def set_scripted(is_scripted: bool) -> None:
    """Whether the session belongs to `sonde run`."""
    global _scripted
    _scripted = is_scripted


def use(session: Session | NullSession) -> None:
    """Make it the session of this process."""
    global _current
    _current = session
