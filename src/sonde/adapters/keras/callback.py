"""Keras 3 on TensorFlow, JAX or torch: one callback records `fit`, with the gradients that the optimizer uses.

    model.fit(x, y, callbacks=[SondeCallback(project="mnist")])

While `fit` runs, the model's training function is replaced by one that returns sketches in addition to its numbers,
compiled like Keras's own; the original is restored afterwards, however `fit` ends. Nothing waits.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, Unpack, cast

from sonde.config import Settings
from sonde.errors import MissingPackageError, UsageError

try:
    import keras
except ImportError as error:
    raise MissingPackageError("keras", "keras", "SondeCallback") from error

from keras import ops

from sonde.adapters.keras.backend import BACKEND, wait_for_callbacks
from sonde.adapters.keras.recorder import KerasRecorder
from sonde.adapters.keras.snapshots import KINDS
from sonde.probe.schedule import When, as_schedule, every, first
from sonde.session import NullSession, Session
from sonde.session.entry.trainer import TrainerSession
from sonde.session.keywords import RunKeywords, spelled_out, with_defaults
from sonde.session.snapshot_plan import Snapshots
from sonde.session.snapshots.external import check_plan
from sonde.write.tensors.store import check_store

DEFAULT_WHEN: Final = first(100) | every(10)
"""Sketches of a compiler's operations cost many times as much as our torch kernels. The budget thins out further."""
_TOLD: Final = tuple(
    f"on_{what}_{when}" for what in ("epoch", "train_batch", "test", "test_batch") for when in ("begin", "end")
)


class SondeCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Records `fit`. Uses a session that was passed in or is already open, and leaves it open; otherwise starts one.

    `SondeCallback(project="mnist", activations=False, when=every(10))`: `when` is a schedule as in `sonde.watch`; on
    other steps Keras's own training function runs. `snapshots`: whole tensors to keep, as in `sonde.watch`. All other
    keywords are options of `sonde.init`. Used for another `fit`, it continues the same run.
    """

    @spelled_out(RunKeywords)
    def __init__(
        self,
        session: Session | NullSession | None = None,
        *,
        activations: bool = True,
        optim: bool = True,
        when: When = True,
        snapshots: Snapshots | When = None,
        **init: Unpack[RunKeywords],
    ) -> None:
        super().__init__()
        given: dict[str, Any] = {"activations": activations, "optim": optim, "when": when, "snapshots": snapshots}
        self._given = {name: value for name, value in given.items() if value is not _DEFAULTS[name]}
        _checked(self._given)
        self._plan = check_plan(snapshots, KINDS)
        check_store(self._plan.store, self._plan.options)
        # Also for a session that has started.
        self._budget: Any = Settings.load(budget=init["budget"]).budget if "budget" in init else ...
        self._joining = TrainerSession(session, init)
        self._recorder: KerasRecorder | None = None
        self._left: Any = None
        self._seen = (0, 0)
        """Iterations of the optimizer when its position was last known, and the next step of the run at that time."""

    def _asked(self, session: Session) -> dict[str, Any]:
        """The keywords of this callback; for what it does not say, those of the session."""
        asked = with_defaults(session, self._given)
        return _checked({name: value for name, value in asked.items() if name in _DEFAULTS})

    @property
    def session(self) -> Session | NullSession | None:
        """The session, once training has started."""
        return self._joining.session

    def on_train_begin(self, logs: Any = None) -> None:
        self.failed(None)  # left by an earlier `fit` whose end was not seen
        model, before = self.model, self.session
        resume = before.path if isinstance(before, Session) else None
        session = self._joining.begin(_config(model, self.params or {}), resume=resume)
        if not isinstance(session, Session):
            return
        self._follow_optimizer(session)
        try:
            self._recorder = KerasRecorder(
                session,
                model,
                **self._asked(session),
                budget=self._budget,
                num_batches=(self.params or {}).get("steps"),
                iterations=_iterations(model),
                on_error=self.failed,
            )
        except Exception as error:  # noqa: BLE001 - our failure must not end their training
            session.recording.breaker("keras", error)
            return
        session.recording.at_finish.append(self._recorder.restore)
        self._look_out(self._recorder)

    def _look_out(self, recorder: KerasRecorder) -> None:
        """Keras does not report that `fit` has failed. But a list calls all callbacks, and is freed when `fit` ends."""
        inside = sys._getframe(2).f_locals.get("self")
        if not isinstance(inside, keras.callbacks.CallbackList):
            return
        here, me = weakref.ref(inside), weakref.ref(self)
        for name in _TOLD:
            vars(inside)[name] = functools.partial(_watched, me, here, name)
        self._left = weakref.finalize(inside, _left, me, weakref.ref(recorder))
        self._left.atexit = False  # then the session itself checks how the program ends

    def _follow_optimizer(self, session: Session) -> None:
        """An optimizer with fewer iterations than before was restored from a checkpoint, and training returned to its
        step. One without any is new: the steps of the run continue."""
        iterations, (known, next_step) = _iterations(self.model), self._seen
        if not known and iterations:
            self._joining.return_to(iterations)
        elif 0 < iterations < known:
            self._joining.return_to(max(next_step - (known - iterations), 0), session.path)
        self._seen = iterations, session.next_step

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """`BackupAndRestore` may come after this callback, and restore the optimizer when training starts."""
        recorder = self._recorder
        if recorder is not None and recorder.is_fresh and _iterations(self.model) != self._seen[0]:
            self._follow_optimizer(recorder.session)
            recorder.set_iterations(self._seen[0])

    def _remember(self, recorder: KerasRecorder) -> None:
        optimizer = recorder.model.optimizer
        if BACKEND == "jax" and optimizer is not None and optimizer.iterations._value is None:
            return  # an interrupted `fit` leaves the variables without values: use the last known position
        try:
            self._seen = _iterations(recorder.model), recorder.session.next_step
        except Exception as error:  # noqa: BLE001 - an optimizer whose buffers are gone must not end their program
            recorder.session.recording.breaker("keras", error)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._recorder is not None:
            self._recorder.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log validation results at the last step of the epoch. Other values are recorded as they come."""
        if isinstance(self.session, Session):
            values = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
            self.session.log(values, step=max(self.session.step_number - 1, 0))

    def on_train_end(self, logs: Any = None) -> None:
        self._end(None)

    def failed(self, error: BaseException | None) -> None:
        """`fit` has ended without `on_train_end`."""
        if self._recorder is not None:
            self._end(error or RuntimeError("fit() did not finish"))

    def _end(self, error: BaseException | None) -> None:
        recorder, self._recorder = self._recorder, None
        dying = None if self._left is None else self._left.detach()
        if dying is not None:
            for name in _TOLD:
                vars(dying[0]).pop(name, None)
        if recorder is not None:
            recorder.restore()
            _wait(recorder.session)
            self._remember(recorder)
        self._joining.end(error)


TracerCallback = SondeCallback
_DEFAULTS: Final = {"activations": True, "optim": True, "when": True, "snapshots": None}
_OF_WATCH: Final = frozenset({*_DEFAULTS, "budget"})
"""The keywords of `watch` that a Keras model has too."""


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    asked = {**_DEFAULTS, **given}
    when = as_schedule(asked["when"], default=DEFAULT_WHEN, argument="when")
    return {**asked, "when": when, "snapshots": check_plan(asked["snapshots"], KINDS)}


def _iterations(model: Any) -> int:
    """Steps that the model's optimizer has made."""
    return 0 if model.optimizer is None else int(ops.convert_to_numpy(model.optimizer.iterations))


def _wait(session: Session) -> None:
    """Wait for JAX activations that are still being computed."""
    if BACKEND != "jax":
        return
    try:
        wait_for_callbacks()
    except Exception as error:  # noqa: BLE001 - our failure must not end their training
        session.recording.breaker("keras", error)


def _watched(callback: weakref.ref[SondeCallback], called: weakref.ref[Any], name: str, *args: Any, **kw: Any) -> Any:
    """A method of the list of callbacks. It keeps nothing alive: we wait for the list to be freed."""
    called_list, known = called(), callback()
    try:
        return getattr(type(called_list), name)(called_list, *args, **kw)
    except BaseException as error:
        if known is not None:
            known.failed(error)
        raise


def _left(callback: weakref.ref[SondeCallback], recorder: weakref.ref[KerasRecorder]) -> None:
    known = callback()
    if known is not None and known._recorder is not None and known._recorder is recorder():
        known.failed(sys.exc_info()[1])


def record_model(model: Any, options: Mapping[str, Any]) -> Any:
    """`sonde.record(model)`: each of its `fit` calls is recorded, one after the other in the same run."""
    vars(model)["fit"] = functools.partial(_fit, SondeCallback(**options), model.fit)
    return model


def watch_model(model: Any, session: Session, given: Mapping[str, Any]) -> None:
    """`sonde.watch(model)`: each of its `fit` calls is recorded in this session."""
    check_watch(given)
    callback = SondeCallback(session, **cast(Any, given))
    session.steps.snapshots.follow_external(callback._plan)
    own = vars(model).get("fit")
    vars(model)["fit"] = functools.partial(_fit, callback, model.fit)

    def restore() -> None:
        vars(model).pop("fit", None) if own is None else vars(model).update(fit=own)

    session.recording.at_finish.append(restore)


def check_watch(given: Mapping[str, Any]) -> None:
    """Refuse keywords of `watch` that Keras has no use for, and invalid values."""
    wrong = sorted(given.keys() - _OF_WATCH)
    if wrong:
        raise UsageError(f"watch() of a Keras model has no {wrong[0]}=. Known: {', '.join(sorted(_OF_WATCH))}.")
    SondeCallback(**cast(Any, given))


def record_class(model_class: Any, options: Mapping[str, Any]) -> Any:
    """`@sonde.record` on a model class: each `fit` of each instance. Returns the function that undoes it."""
    own, original = vars(model_class).get("fit"), model_class.fit
    callbacks: weakref.WeakKeyDictionary[Any, SondeCallback] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        callback = callbacks.setdefault(model, SondeCallback(**options))
        return _fit(callback, original.__get__(model), *args, **kwargs)

    def restore() -> None:
        if vars(model_class).get("fit") is fit:
            delattr(model_class, "fit") if own is None else setattr(model_class, "fit", own)

    model_class.fit = fit
    return restore


def record_fits(session: Session) -> None:
    """`@sonde.record` on a function: each `fit` in it."""
    session.recording.at_finish.append(record_class(keras.Model, {"session": session}))


def _fit(callback: SondeCallback, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    names = list(inspect.signature(original).parameters)
    at = names.index("callbacks") if "callbacks" in names else len(args)
    given = args[at] if at < len(args) else kwargs.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList) or any(isinstance(c, SondeCallback) for c in _flat_list(given)):
        return original(*args, **kwargs)
    more = [*_flat_list(given), callback]
    if at < len(args):
        args = (*args[:at], more, *args[at + 1 :])
    else:
        kwargs["callbacks"] = more
    try:
        return original(*args, **kwargs)
    except BaseException as error:
        callback.failed(error)
        raise
    finally:
        callback.set_model(None)  # it may outlive the model, and must not keep it alive


def _flat_list(callbacks: Any) -> list[Any]:
    return keras.tree.flatten(callbacks) if callbacks else []


def _config(model: Any, params: Mapping[str, Any]) -> dict[str, Any]:
    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}

    config: dict[str, Any] = {"keras": keras.__version__, "backend": BACKEND, "model": model.name, **plain(params)}
    if model.optimizer is not None:
        config["optimizer"] = plain(model.optimizer.get_config())
    return config
