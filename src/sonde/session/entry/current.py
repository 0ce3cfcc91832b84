"""The session of this process, and the functions that act on it: `sonde.init`, `sonde.watch`, `sonde.log` and so on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sonde.config import Settings
from sonde.errors import RunNotFoundError, SessionError
from sonde.probe.schedule import ALWAYS, DEFAULT_ACTIVATIONS, DEFAULT_INSPECT
from sonde.session.entry.command import CommandLine, Described
from sonde.session.entry.description import as_config, as_tags, as_text
from sonde.session.null import NullSession
from sonde.session.process.ending import shown
from sonde.session.session import Session
from sonde.write.folder import absolute, create_run, find_resumable
from sonde.write.ranks import announce, rank, world_size

_current: Session | NullSession | None = None
_command: CommandLine | None = None
"""That of `sonde run`, while its script runs."""
_on_begun: Callable[[Session | NullSession], None] | None = None
"""Called with each session that the script of `sonde run` begins."""
_unclaimed: Session | None = None
"""A session that `sonde run` began by itself, before the script has said anything about it."""


def init(
    project: str | None = None,
    name: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    config: Any = None,
    tags: Any = (),
    notes: str = "",
    resume: bool | str | os.PathLike[str] = False,
    **settings: Any,
) -> Session | NullSession:
    """Begin a run. `config` is a mapping, a dataclass or parsed arguments. `resume=True` goes on with the newest
    interrupted run of the project; a name or path, with that one.

    session = sonde.init(project="gpt", name="baseline", config={"lr": 3e-4})
    """
    given = {key: value for key, value in {"project": project, "dir": dir, **settings}.items() if value is not None}
    described = Described(
        name=as_text(name) or None, config=as_config(config), tags=as_tags(tags), notes=as_text(notes), resume=resume
    )
    return _init(given, described)


def init_by_default(project: str, /, **options: Any) -> Session | NullSession:
    """`init`, in a project of this name unless the options, a variable or a file name another."""
    if options.get("project") is None and Settings.load().origin("project") == "default":
        options = {**options, "project": project}
    return init(**options)


def _init(given: dict[str, Any], described: Described) -> Session | NullSession:
    global _current
    gave_way: list[str] = []
    if _command is None:
        loaded = Settings.load(**given)
    else:
        loaded, described, gave_way = _command.merged(given, described)
    _end_current()
    _current = begin(
        loaded,
        name=described.name,
        config=described.config,
        tags=described.tags,
        notes=described.notes,
        resume=described.resume,
    )
    if gave_way and isinstance(_current, Session):
        _current.recording.event("command_line", f"the command line of `sonde run` replaced {', '.join(gave_way)}")
    if _on_begun is not None:
        _on_begun(_current)
    return _current


def _end_current() -> None:
    global _unclaimed
    unclaimed, _unclaimed = _unclaimed, None
    if not isinstance(_current, Session) or _current.is_finished:
        return
    if _current is unclaimed and _current.is_fresh:
        _current._discard()  # the script begins its own run; nothing was trained yet
    else:
        _current.recording.warn("a new session begins; the one before it is finished.")
        _current.finish()


def begin(
    settings: Settings,
    *,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    resume: bool | str | os.PathLike[str] = False,
    is_same_attempt: bool = False,
) -> Session | NullSession:
    """A session of its own, beside the one of this process. Only the first rank of a distributed job records all; the
    others tell it where a value stopped being finite."""
    if settings.mode == "disabled":
        return NullSession()
    settings = settings.model_copy(update={"dir": absolute(settings.dir)})
    if rank() != 0:
        from sonde.session.ranks.other_rank import RankSession

        return RankSession(settings)
    found = _find(resume, settings, name) if resume else None
    path = found or create_run(settings.dir, project=settings.project, name=name, config=config, tags=tags, notes=notes)
    session = Session(path, settings, resume=found is not None, is_same_attempt=is_same_attempt)
    if resume and found is None:
        session.recording.say(f"no run of {settings.project} to resume in {shown(settings.dir)}: this is a new one")
    if world_size() > 1:
        note = announce(settings.dir, path, step=session.step_number)
        session.recording.at_finish.append(partial(note.unlink, missing_ok=True))
    return session


def _find(resume: bool | str | os.PathLike[str], settings: Settings, name: str | None) -> Path | None:
    if isinstance(resume, bool):
        return find_resumable(settings.dir, project=settings.project, name=name)
    for path in (Path(resume), settings.dir / resume):
        if path.is_dir():
            return path.resolve()  # `runs/latest` will point to the next run
    project, _, wanted = os.fspath(resume).rpartition("/")
    found = find_resumable(settings.dir, project=project or settings.project, name=wanted)
    if found is None:
        raise RunNotFoundError(f'no run "{resume}" to resume under {settings.dir}. `sonde list` shows what is there.')
    return found


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

    Each kind takes True, False, a schedule such as `every(10)`, or a function of the step. `sites` is a glob, a regular
    expression, a module type, a list of these, or a function of name and module. With no optimizer named, any that
    steps this model's parameters is followed. `budget` is the share of a step's time to spend; left out, it is the
    setting's. `mirror` forwards chosen numbers and all findings to "wandb", "tensorboard", "mlflow" or "trackio". The
    keywords of `wandb.watch`, `log=` and `log_freq=`, are understood.

    with sonde.watch(model, optimizer):
        train()
    """
    session = _claimed()
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
    """The session of this process, unless it is finished or none was begun; one that is only there because a model was
    called under `sonde run`, before anything was trained, does not count."""
    if _current is None or _current.is_finished or (_current is _unclaimed and _unclaimed.is_fresh):
        return None
    return _current


def _claimed() -> Session | NullSession | None:
    """The session, which from now on is the script's."""
    global _unclaimed
    _unclaimed = None
    return _current


def _active() -> Session | NullSession:
    session = _claimed()
    if session is None and _command is not None:
        session = init()
    if session is None:
        raise SessionError("no session. Begin one first:  sonde.init(project=...)  or  sonde.watch(model)")
    return session


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record numbers at this step: `sonde.log({"loss": loss})`. Tensors are taken without waiting for the device."""
    _active().log(values, step)


def step() -> None:
    """End the step, in a loop without a watched optimizer; where one is watched, its own steps count."""
    _active().step()


def rewind(step: int) -> bool:
    """Return to an earlier step after restoring its checkpoint: `sonde.rewind(100)`. It is the next step recorded.

    Steps recorded from there on are abandoned: they are no longer shown, but stay readable as an earlier attempt.
    """
    return _active().rewind(step)


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


def use_command(command: CommandLine | None, on_begun: Callable[[Session | NullSession], None] | None = None) -> None:
    """Begin runs as this command line says, and tell `on_begun` of each; None: as in any other program."""
    global _command, _on_begun, _unclaimed, _current
    _command, _on_begun, _unclaimed = command, on_begun, None
    if _current is not None and _current.is_finished:
        _current = None


def begin_unclaimed() -> Session | NullSession:
    """Begin a run for a script that has not begun one. The script's own `init` may still replace it."""
    global _unclaimed
    session = init()
    _unclaimed = session if isinstance(session, Session) else None
    return session


def use(session: Session | NullSession) -> None:
    """Make it the session of this process."""
    global _current
    _current = session
