"""The keywords of `watch` and `init`, defined once for type checkers, `help()`, completion and error messages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypedDict, TypeVar, cast

from sonde.config import RecordSettings, SettingKeywords, Settings
from sonde.errors import UnknownNameError, UsageError
from sonde.probe.schedule import ALWAYS, DEFAULT_ACTIVATIONS, DEFAULT_INSPECT, When, parse_schedule
from sonde.probe.select import Sites
from sonde.schema.old_names import REMOVED_SETTINGS
from sonde.schema.old_names import SETTINGS as RENAMED_SETTINGS
from sonde.session.snapshot_plan import Snapshots

if TYPE_CHECKING:
    from torch.nn.modules.loss import _Loss
    from torch.optim import Optimizer

    from sonde.session.observers.delivery import Sink
    from sonde.session.observers.mirror import Mirror

OLD_SETTINGS: Final = RENAMED_SETTINGS.keys() | REMOVED_SETTINGS.keys()
"""Names of earlier versions, which are still accepted."""
F = TypeVar("F", bound=Callable[..., Any])

Optimizers: TypeAlias = "Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | _Loss | None"
"""One optimizer, several, or None for every one that updates the model. A loss function is ignored, as in
`wandb.watch(model, criterion)`."""
Tags: TypeAlias = str | Iterable[object] | Mapping[str, object] | None
Resume: TypeAlias = bool | str | os.PathLike[str]


class LogsMetrics(Protocol):
    """A tracker such as a Comet experiment or a Lightning logger."""

    def log_metrics(self, metrics: Any, /, *, step: Any) -> Any: ...


Tracker: TypeAlias = "str | Mirror | Sink | LogsMetrics"


class _Kinds(TypedDict, total=False):
    params: When
    grads: When
    updates: When
    optim: When
    activations: When | Literal["in-graph"]
    activation_grads: When
    inspect: When
    sites: Sites
    when: When
    snapshots: Snapshots | When
    mirror: Tracker | Sequence[Tracker] | None
    prefix: str
    # Those of `wandb.watch`.
    log: Literal["gradients", "parameters", "all"] | None
    log_freq: int
    criterion: object
    idx: int | None
    log_graph: bool


class WatchKeywords(_Kinds, total=False):
    """The keywords of `Session.watch`."""

    budget: float | None


class RunKeywords(SettingKeywords, total=False):
    """The keywords of `sonde.init`: the description of a run, and settings."""

    name: str | None
    config: object
    tags: Tags
    notes: str | None
    resume: Resume


class WatchRunKeywords(_Kinds, RunKeywords, total=False):
    """The keywords of `sonde.watch`, which starts a run if needed."""


DEFAULTS: Final[Mapping[str, Any]] = {
    "params": True,
    "grads": True,
    "updates": True,
    "optim": True,
    "activations": DEFAULT_ACTIVATIONS,
    "activation_grads": False,
    "inspect": DEFAULT_INSPECT,
    "sites": "*",
    "when": ALWAYS,
    "snapshots": None,
    "mirror": None,
    "prefix": "",
    "project": None,
    "name": None,
    "dir": None,
    "config": None,
    "tags": (),
    "notes": "",
    "resume": False,
    **{name: field.default for name, field in Settings.model_fields.items()},
    "log": "all",
    "log_freq": 1,
    "criterion": None,
    "idx": None,
    "log_graph": False,
}
"""Value of each keyword that is not given, in the order of `help()`. For settings, the one used if no variable and no
file sets another."""


def spelled_out(keywords: Any) -> Callable[[F], F]:
    """List the keywords of a TypedDict in the signature of a function that takes them as `**keywords`.

    Type checkers read `Unpack[...]`; `help()`, `inspect` and completion read this.
    """

    def decorate(function: F) -> F:
        own, annotations = inspect.signature(function), keywords.__annotations__
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        listed = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=_text(annotations[name])
            )
            for name in sorted(annotations, key=list(DEFAULTS).index)
        ]
        setattr(function, "__signature__", own.replace(parameters=[*named, *listed]))  # noqa: B010
        return function

    return decorate


def _text(annotation: Any) -> str:
    return str(getattr(annotation, "__forward_arg__", annotation))


def run_part(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that describe or configure a run. `budget` also applies to a run that has started."""
    names = RunKeywords.__annotations__.keys() | OLD_SETTINGS
    return {name: value for name, value in given.items() if name in names and name != "budget"}


def check_names(given: Iterable[str], keywords: Any, function: str) -> None:
    """Refuse a keyword that does not exist."""
    known = [*keywords.__annotations__]
    is_run = "project" in known
    for name in given:
        if name not in known and not (is_run and name in OLD_SETTINGS):
            raise UnknownNameError(f"{function} keyword", name, known)


IN_PYTHON_ONLY: Final = frozenset({"budget", "prefix", "log", "log_freq", "criterion", "idx", "log_graph"})
"""Keywords of `watch` that `record` does not have: a setting of the same name, the name of one model of several, and
those of `wandb.watch`."""
_PLAIN: Final = ("sites", "mirror")


def watch_keywords(settings: Settings) -> WatchKeywords:
    """The setting `record` as keywords of `watch`. An invalid value raises here."""
    found: dict[str, Any] = {}
    for name in RecordSettings.model_fields:
        value = getattr(settings.record, name)
        if value is not None:
            found[name] = value if name in _PLAIN else _parsed(name, value, f"record.{name}")
    return cast(WatchKeywords, found)


class HasDefaults(Protocol):
    """A session: what it says about models that are watched without keywords."""

    defaults: dict[str, Any]
    overrides: Mapping[str, Any]


def with_defaults(session: HasDefaults, given: Mapping[str, Any]) -> WatchKeywords:
    """The keywords of a call of `watch`, with those of the session for what it does not say."""
    return cast(WatchKeywords, {**session.defaults, **given, **session.overrides})


def _parsed(name: str, value: Any, label: str) -> Any:
    if name == "snapshots" and isinstance(value, Mapping):
        return _snapshots(value)
    if not isinstance(value, str) or (name == "activations" and value == "in-graph"):
        return value
    try:
        return parse_schedule(value)
    except UsageError as error:
        raise UsageError(f"{label}: {error}") from None


def _snapshots(given: Mapping[str, Any]) -> Snapshots:
    known = [field.name for field in fields(Snapshots) if field.name != "probe"]
    for name in given:
        if name not in known:
            raise UsageError(f'record.snapshots has no "{name}". Known: {", ".join(known)}.')
    when = {"when": _parsed("when", given["when"], "record.snapshots.when")} if "when" in given else {}
    return Snapshots(**{**given, **when})
