"""The keywords of `watch` and `init`, defined once for type checkers, `help()`, completion and error messages."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypedDict, TypeVar

from sonde.config import SettingKeywords, Settings
from sonde.errors import UnknownNameError
from sonde.probe.schedule import ALWAYS, DEFAULT_ACTIVATIONS, DEFAULT_INSPECT, When
from sonde.probe.select import Sites
from sonde.schema.old_names import REMOVED_SETTINGS
from sonde.schema.old_names import SETTINGS as RENAMED_SETTINGS

if TYPE_CHECKING:
    from torch.nn.modules.loss import _Loss
    from torch.optim import Optimizer

    from sonde.session.observers.delivery import Sink
    from sonde.session.observers.mirror import Mirror
    from sonde.session.snapshot_plan import Snapshots

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
