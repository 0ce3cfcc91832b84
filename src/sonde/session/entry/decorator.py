"""`@sonde.record`: on a training function, a model class, or a model."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import util
from importlib.metadata import entry_points
from typing import Any

from sonde.errors import NotAModelError, UsageError
from sonde.session.entry import current
from sonde.session.session import Session


def record(target: Any = None, /, **options: Any) -> Any:
    """Record a training function, every instance of a model class, or one model.

    @sonde.record                          # the models trained inside are found and watched
    def train(): ...

    @sonde.record(project="gpt")           # every GPT made while a session runs is watched
    class GPT(nn.Module): ...

    model = sonde.record(model)            # the same as sonde.watch(model), and gives the model back

    Of Keras models, classes of them and functions that train them, every `fit` is recorded.
    """
    if target is None:
        return functools.partial(record, **options)
    if _is_keras(target if isinstance(target, type) else type(target)):
        return _record_keras(target, options)
    if isinstance(target, type):
        return _record_class(target, options)
    if hasattr(target, "named_modules"):
        _begin_if_none(options)
        current.watch(target)
        return target
    if callable(target):
        return _record_function(target, options)
    raise NotAModelError(f"@sonde.record goes on a function, a model class or a model; got {type(target).__name__}.")


def _record_function(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        with current.init_by_default(function.__name__.replace("<lambda>", "lambda"), **options) as session:
            if isinstance(session, Session):
                _find_models(session)
            return function(*args, **kwargs)

    return recorded


def _find_models(session: Session) -> None:
    if util.find_spec("torch") is not None:  # a program that trains by another framework may be without
        from sonde.session.entry.automatic import Automatic, automatic_of

        if automatic_of(session) is None:
            Automatic(session)
    if "keras" in sys.modules:
        _keras_adapter().record_fits(session)


def _is_keras(model_class: type) -> bool:
    """Asked without importing it."""
    return any(c.__name__ == "Model" and c.__module__.partition(".")[0] == "keras" for c in model_class.__mro__)


def _keras_adapter() -> Any:
    """Adapters stand above this room, and are plugged in."""
    for entry in entry_points(group="sonde.recorders", name="keras"):
        return entry.load()
    raise UsageError("the adapter for Keras is not installed. Install sonde anew:  pip install --force-reinstall sonde")


def _record_keras(target: Any, options: dict[str, Any]) -> Any:
    if isinstance(target, type):
        _keras_adapter().record_class(target, options)
        return target
    return _keras_adapter().record_model(target, options)


def _record_class(model_class: type, options: dict[str, Any]) -> type:
    """Instances are watched when made; the original `__init__` comes back when the session ends."""
    from torch import nn

    if not issubclass(model_class, nn.Module):
        raise NotAModelError(f"@sonde.record goes on a torch.nn.Module class; {model_class.__name__} is none.")
    original: Any = model_class.__init__

    @functools.wraps(original)
    def watched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is model_class:
            session = _begin_if_none(options)
            if isinstance(session, Session):
                session.recording.at_finish.append(restore)
            current.watch(self)

    def restore() -> None:
        if model_class.__dict__.get("__init__") is watched_init:
            setattr(model_class, "__init__", original)  # noqa: B010

    setattr(model_class, "__init__", watched_init)  # noqa: B010
    return model_class


def _begin_if_none(options: dict[str, Any]) -> Any:
    session = current._current
    return current.init(**options) if session is None or session.is_finished else session
