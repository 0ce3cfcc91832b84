"""`@sonde.record`, for a training function, a model class, or a model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import util
from typing import Any, TypeVar, Unpack, cast, overload

from sonde.errors import NotAModelError
from sonde.session.entry import current
from sonde.session.keywords import (
    OLD_SETTINGS,
    RunKeywords,
    WatchKeywords,
    WatchRunKeywords,
    check_names,
    spelled_out,
)
from sonde.session.model.keras_models import is_keras, keras_adapter
from sonde.session.null import NullSession
from sonde.session.session import Session

T = TypeVar("T")


@overload
def record(target: T, /, **options: Unpack[WatchRunKeywords]) -> T: ...
@overload
def record(target: None = None, /, **options: Unpack[WatchRunKeywords]) -> Callable[[T], T]: ...
@spelled_out(WatchRunKeywords)
def record(target: Any = None, /, **options: Unpack[WatchRunKeywords]) -> Any:
    """Record a training function, every instance of a model class, or one model. The keywords are those of `init` and
    `watch`; in a function, they apply to every model that it trains, but the keywords of its calls of `watch` win.

    @sonde.record                          # watches the models that are trained inside
    def train(): ...

    @sonde.record(snapshots=sonde.every(100))
    def train(): ...                       # also keeps whole tensors

    @sonde.record(project="gpt")           # every GPT made while a session runs is watched
    class GPT(nn.Module): ...

    model = sonde.record(model)            # the same as sonde.watch(model), and returns the model

    For Keras models, Keras model classes and functions that train them, every `fit` is recorded.
    """
    if target is None:
        return functools.partial(record, **options)
    if is_keras(target if isinstance(target, type) else type(target)):
        return _record_keras(target, options)  # its callback has more keywords
    check_names(options, WatchRunKeywords, "record()")
    if isinstance(target, type):
        return _record_class(target, options)
    if hasattr(target, "named_modules"):
        _watch(target, options)
        return target
    if callable(target):
        return _record_function(target, options)
    raise NotAModelError(f"@sonde.record decorates a function, a model class or a model; got {type(target).__name__}.")


def _record_function(function: Callable[..., Any], options: WatchRunKeywords) -> Callable[..., Any]:
    described, kinds = _parts(options)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with current.init_by_default(function.__name__.replace("<lambda>", "lambda"), **described) as session:
            if isinstance(session, Session):
                session.defaults.update(kinds)
                _find_models(session)
            return function(*args, **kwargs)

    return recorded


def _parts(options: WatchRunKeywords) -> tuple[RunKeywords, WatchKeywords]:
    """The keywords of `init`, and those of `watch`."""
    described = {
        name: value for name, value in options.items() if name in RunKeywords.__annotations__ or name in OLD_SETTINGS
    }
    kinds = {name: value for name, value in options.items() if name not in described}
    return cast(RunKeywords, described), cast(WatchKeywords, kinds)


def _find_models(session: Session) -> None:
    if util.find_spec("torch") is not None:  # a program that uses another framework may not have it installed
        from sonde.session.entry.automatic import Automatic, automatic_of

        if automatic_of(session) is None:
            Automatic(session)
    if "keras" in sys.modules:
        keras_adapter().record_fits(session)


def _record_keras(target: Any, options: RunKeywords) -> Any:
    if isinstance(target, type):
        keras_adapter().record_class(target, options)
        return target
    return keras_adapter().record_model(target, options)


def _record_class(model_class: type, options: WatchRunKeywords) -> type:
    """Watch each instance when it is created; the original `__init__` is restored when the session ends."""
    from torch import nn

    if not issubclass(model_class, nn.Module):
        raise NotAModelError(f"@sonde.record decorates a torch.nn.Module class; {model_class.__name__} is not one.")
    original: Any = model_class.__init__

    @functools.wraps(original)
    def watched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is model_class:
            session = _watch(self, options)
            if isinstance(session, Session):
                session.recording.at_finish.append(restore)

    def restore() -> None:
        if model_class.__dict__.get("__init__") is watched_init:
            setattr(model_class, "__init__", original)  # noqa: B010

    setattr(model_class, "__init__", watched_init)  # noqa: B010
    return model_class


def _watch(model: Any, options: WatchRunKeywords) -> Session | NullSession:
    """Watch a model in the session of this process; the keywords of `init` describe one that starts here."""
    session = current._current
    if session is None or session.is_finished:
        return current.watch(model, **options)
    return session.watch(model, **_parts(options)[1])
