"""The session of this process, and the functions that act on it: `sonde.init`, `sonde.watch`, `sonde.log` and so on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Unpack, cast, get_args

from sonde.config import RecordingSettings, Settings
from sonde.errors import RunNotFoundError, SessionError
from sonde.schema.records import to_json
from sonde.session.entry.command import CommandLine, Described
from sonde.session.entry.description import as_config, as_tags, as_text
from sonde.session.keywords import (
    Optimizers,
    Resume,
    RunKeywords,
    Tags,
    WatchKeywords,
    WatchRunKeywords,
    check_names,
    run_part,
    spelled_out,
    watch_keywords,
)
from sonde.session.model.keras_models import is_fitted, keras_adapter
from sonde.session.null import NullSession
from sonde.session.process.ending import shown
from sonde.session.session import Session
from sonde.write.folder import absolute, create_run, find_resumable
from sonde.write.ranks import announce, rank, world_size

if TYPE_CHECKING:
    from torch import nn

_DESCRIPTION: Final = ("name", "config", "tags", "notes", "resume")
"""Arguments of `init` that are not settings."""
_NULLABLE: Final = tuple(
    name for name, field in Settings.model_fields.items() if type(None) in get_args(field.annotation)
)
"""Settings for which None is a value; for all others it means "not given"."""
_current: Session | NullSession | None = None
_asked: dict[str, str] = {}
"""The arguments of `init` that started the current session."""
_command: CommandLine | None = None
"""The command line of `sonde run`, while its script runs."""
_on_begun: Callable[[Session | NullSession], None] | None = None
"""Called with each session that the script of `sonde run` starts."""
_unclaimed: Session | None = None
"""A session that `sonde run` started itself, before the script has said anything about it."""


class _Prepared(NamedTuple):
    """A run to start, checked."""

    settings: Settings
    described: Described
    asked: dict[str, str]
    gave_way: list[str]


@spelled_out(RecordingSettings)
def init(
    project: str | None = None,
    name: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    config: object = None,
    tags: Tags = (),
    notes: str | None = "",
    resume: Resume = False,
    **settings: Unpack[RecordingSettings],
) -> Session | NullSession:
    """Start a run. `config` is a mapping, a dataclass or parsed arguments. `resume=True` continues the newest run of
    the project, or of the name in it; a name, an id or a folder continues that one. All other keywords are settings,
    which `sonde doctor --settings` explains.

    session = sonde.init(project="gpt", name="baseline", config={"lr": 3e-4})
    """
    described = {"project": project, "name": name, "dir": dir, "config": config, "tags": tags, "notes": notes}
    return _start(_prepared({**described, "resume": resume, **settings}))


def check_init(options: RunKeywords) -> None:
    """Raise what `init` would raise for these keywords, without starting a run."""
    _prepared(options)


def init_by_default(project: str, /, **options: Unpack[RunKeywords]) -> Session | NullSession:
    """`init`, with this project name unless the options, a variable or a file set another."""
    if options.get("project") is None and Settings.load().origin("project") == "default":
        options["project"] = project
    return init(**options)


def _prepared(keywords: Mapping[str, Any]) -> _Prepared:
    """The run that these keywords of `init` describe. Raises if one is invalid; nothing has started yet."""
    given = {name: value for name, value in keywords.items() if name not in _DESCRIPTION}
    given = {name: value for name, value in given.items() if value is not None or name in _NULLABLE}
    described = Described(
        name=as_text(keywords.get("name")) or None,
        config=as_config(keywords.get("config")),
        tags=as_tags(keywords.get("tags")),
        notes=as_text(keywords.get("notes")),
        resume=keywords.get("resume", False),
    )
    asked = _comparable({**given, **{name: getattr(described, name) for name in _DESCRIPTION}})
    if _command is None:
        prepared = _Prepared(Settings.load(**cast(Any, given)), described, asked, [])
    else:
        loaded, merged, gave_way = _command.merged(given, described)
        prepared = _Prepared(loaded, merged, asked, gave_way)
    watch_keywords(prepared.settings)  # refuses what `watch` would refuse
    return prepared


def _comparable(asked: Mapping[str, Any]) -> dict[str, str]:
    """Values as text: a config may hold arrays, whose comparison is an array, and objects whose `repr` fails."""
    return {name: to_json(value) for name, value in asked.items()}


def _start(run: _Prepared) -> Session | NullSession:
    global _current, _asked
    began_s = time.perf_counter()
    _end_current()
    session = begin(run.settings, **{name: getattr(run.described, name) for name in _DESCRIPTION})
    _current, _asked = session, run.asked
    if _command is not None and hasattr(session, "overrides"):
        session.overrides = _command.overrides
    if isinstance(_current, Session):
        _current.recording.ledger.begin(began_s)
    if run.gave_way and isinstance(_current, Session):
        _current.recording.event("command_line", f"options of `sonde run` replaced {', '.join(run.gave_way)}")
    if _on_begun is not None:
        _on_begun(_current)
    return _current


def _end_current() -> None:
    global _unclaimed
    unclaimed, _unclaimed = _unclaimed, None
    if not isinstance(_current, Session) or _current.is_finished:
        return
    if _current is unclaimed and _current.is_fresh:
        _current._discard()  # the script starts its own run; nothing was trained yet
    else:
        _current.recording.warn("starting a new session; the previous one was finished.")
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
    """A separate session, independent of the current one of this process. Only the first rank of a distributed job
    records everything; the others report to it where a value became NaN or Inf."""
    if settings.mode == "disabled":
        return NullSession()
    settings = settings.model_copy(update={"dir": absolute(settings.dir)})
    if rank() != 0:
        from sonde.session.ranks.other_rank import RankSession

        return RankSession(settings, Session)
    found = _find(resume, settings, name) if resume else None
    path = found or create_run(
        settings.dir,
        project=settings.project,
        name=name,
        config=config,
        tags=tags,
        notes=notes,
        mask_secrets=settings.mask_secrets,
    )
    session = Session(path, settings, resume=found is not None, is_same_attempt=is_same_attempt)
    if resume and found is None:
        session.recording.say(f"no run of {settings.project} to resume in {shown(settings.dir)}: starting a new one")
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
        raise RunNotFoundError(f'no run "{resume}" to resume under {settings.dir}. List runs with `sonde list`.')
    return found


@spelled_out(WatchRunKeywords)
def watch(
    model: nn.Module, optimizer: Optimizers = None, **keywords: Unpack[WatchRunKeywords]
) -> Session | NullSession:
    """Record what happens inside a model while it trains; starts a run if there is none.

    with sonde.watch(model, optimizer, project="gpt", config={"lr": 3e-4}):
        train()

    What to record:
      params, grads, updates, optim, activations, activation_grads, inspect
                  True, False, a schedule such as `every(10)`, or a function of the step. `activations="in-graph"` also
                  records inside compiled regions. `inspect` measures what rules need.
      when        The schedule of every kind that is given no other one.
      sites       A glob, a regular expression, a module type, a list of these, or a function of name and module.
      optimizer   One or several. Without it, sonde follows every optimizer that updates this model's parameters.
      budget      The fraction of the time that recording may add, in addition to the setting `budget_seconds`.
      snapshots   Whole tensors to keep: True, a schedule, or `sonde.Snapshots(...)`.
      mirror      Forward chosen numbers and all findings to "wandb", "tensorboard", "mlflow" or "trackio".
      prefix      Put before the names of this model's sites, to tell several models apart.

    The run: `project`, `name`, `dir`, `config`, `tags`, `notes`, `resume` and the settings are those of `sonde.init`.
    If they describe the current run, it is used; otherwise a new one starts. The `wandb.watch` keywords `log` and
    `log_freq` also work.

    Of a compiled Keras model, every `fit` is recorded; `activations`, `optim`, `when`, `snapshots` and `budget` apply.
    """
    check_names(keywords, WatchRunKeywords, "watch()")
    described = run_part(keywords)
    given = cast(WatchKeywords, {name: value for name, value in keywords.items() if name not in described})
    if _goes_to_current(described):
        session = _claimed()
        assert session is not None
        return session.watch(model, optimizer, **given)
    return _start_with(_prepared({**described, **_budget(given)}), model, optimizer, given)


def _budget(given: WatchKeywords) -> dict[str, float | None]:
    return {"budget": given["budget"]} if "budget" in given else {}


def _goes_to_current(described: Mapping[str, Any]) -> bool:
    """Whether there is a run, and these keywords of `init` describe it."""
    if _current is None or _current.is_finished:
        return False
    wanted = _prepared(described).asked
    return all(_asked.get(name) == wanted[name] for name in described if name in wanted)


def _start_with(run: _Prepared, model: nn.Module, optimizer: Optimizers, given: WatchKeywords) -> Session | NullSession:
    """Check the arguments of `watch`, then start the run. A run that then cannot watch the model is removed."""
    if run.settings.mode == "disabled":
        return _start(run)
    if is_fitted(model, optimizer):
        keras_adapter().check_watch(given)
        return _start(run).watch(model, optimizer, **given)
    from sonde.session.plan import WatchRequest

    overrides = {} if _command is None else _command.overrides
    asked = cast(WatchKeywords, {**watch_keywords(run.settings), **given, **overrides})
    request = WatchRequest.of(model, optimizer, asked)
    request.check_store()
    session = _start(run)
    try:
        return session._watch(request) if isinstance(session, Session) else session.watch(model, optimizer, **given)
    except BaseException:
        if isinstance(session, Session) and session._is_empty:
            session._discard()
        raise


def active_session() -> Session | NullSession | None:
    """The session of this process, or None if there is none or it is finished. A session that exists only because a
    model was called under `sonde run`, before any training, does not count."""
    if _current is None or _current.is_finished or (_current is _unclaimed and _unclaimed.is_fresh):
        return None
    return _current


def discard_empty() -> bool:
    """Remove the run that `sonde run` started itself if nothing was trained in it. Returns whether it did."""
    global _unclaimed
    unclaimed, _unclaimed = _unclaimed, None
    if unclaimed is None or not unclaimed.is_empty:
        return False
    unclaimed._discard()
    return True


def _claimed() -> Session | NullSession | None:
    """The session, which belongs to the script from now on."""
    global _unclaimed
    _unclaimed = None
    return _current


def _active() -> Session | NullSession:
    session = _claimed()
    if session is None and _command is not None:
        session = init()
    if session is None:
        raise SessionError("no session. Start one first:  sonde.init(project=...)  or  sonde.watch(model)")
    return session


def log(values: Mapping[str, Any], step: int | None = None) -> None:
    """Record numbers at this step: `sonde.log({"loss": loss})`. Tensors are copied without waiting for the device."""
    _active().log(values, step)


def step() -> None:
    """End the step, in a loop without a watched optimizer; with a watched one, its own steps count."""
    _active().step()


def rewind(step: int) -> bool:
    """Return to an earlier step after restoring its checkpoint: `sonde.rewind(100)`. It is the next step recorded.

    Steps recorded from there on are abandoned: they are no longer shown, but stay readable as an earlier attempt.
    """
    return _active().rewind(step)


def batch(inputs: Any, targets: Any = None, *, ids: Any = None) -> None:
    """Announce the next batch: `sonde.batch(x, y)`, or with the names of its samples `sonde.batch(x, y, ids=ids)`.

    Gives the batch an identity, so that sonde recognises it when it comes back. Never waits for the device.
    """
    _active().batch(inputs, targets, ids=ids)


def snapshot(kinds: str | Iterable[str] | None = None) -> int | None:
    """Keep whole tensors of the next step: `sonde.snapshot()`, `sonde.snapshot("param,grad")`. Returns its number."""
    return _active().snapshot(kinds)


def tap(name: str, tensor: Any) -> None:
    """Record a sketch of any tensor: `sonde.tap("logits", logits)`."""
    _active().tap(name, tensor)


def finish() -> None:
    """End the run: write everything and remove every hook."""
    if _current is not None:
        _current.finish()


def use_command(command: CommandLine | None, on_begun: Callable[[Session | NullSession], None] | None = None) -> None:
    """Start runs as this command line says and pass each to `on_begun`; None restores normal behaviour."""
    global _command, _on_begun, _unclaimed, _current
    _command, _on_begun, _unclaimed = command, on_begun, None
    if _current is not None and _current.is_finished:
        _current = None


def begin_unclaimed() -> Session | NullSession:
    """Start a run for a script that has not started one. The script's own `init` may still replace it."""
    global _unclaimed
    session = init()
    _unclaimed = session if isinstance(session, Session) else None
    return session


def use(session: Session | NullSession) -> None:
    """Make this the session of this process."""
    global _current
    _current = session
