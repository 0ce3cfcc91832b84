"""The snapshot plan: which whole tensors to keep, and when, from `watch(..., snapshots=...)`. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, cast

from sonde.errors import UsageError
from sonde.probe.schedule import Schedule, When, as_schedule, every
from sonde.probe.select import Sites
from sonde.schema.snapshots.tensors import SNAPSHOT_KINDS as KINDS
from sonde.schema.snapshots.tensors import parse_kinds

DEFAULT_WHEN: Final = every(500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """The contents of a snapshot, its schedule, and its store. Every field has a default.

    sonde.watch(model, optimizer, snapshots=sonde.Snapshots(when=sonde.every(200), kinds=("param", "grad", "optim")))
    """

    when: When = DEFAULT_WHEN
    """A schedule, a number n for every n-th step, a function of the step, or False for only on request."""
    kinds: str | Iterable[str] = ("param",)
    """Any of `param` (with saved buffers), `grad`, `act`, `optim`, `probe` and `batch`, also as "param,grad"; or
    "all"."""
    sites: Sites = "*"
    """A glob, a regular expression, a module type, a list of these, or a function; applied to what is watched."""
    store: str = "zarr"
    """"zarr", "icechunk", "memory", or the URL of a bucket."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the store."""
    probe: Any = None
    """A batch whose activations are kept in each snapshot: a tensor, a tuple of arguments, or a dict of keywords."""
    on_finding: Literal["critical", "warning"] | None = "critical"
    """Also take one when a rule first reports a finding of at least this severity."""
    at_once: bool = False
    """Copy everything at the optimizer step itself, and let training wait for it: for code that writes to parameters
    behind autograd's back while the model runs."""

    def __post_init__(self) -> None:
        kinds = _kinds(self.kinds, has_probe=self.probe is not None)
        if self.probe is None and "probe" in kinds:
            raise UsageError('kind "probe" needs a probe batch:  Snapshots(kinds=..., probe=batch)')
        if self.on_finding not in ("critical", "warning", None):
            raise UsageError(f'on_finding= must be "critical", "warning" or None; got {self.on_finding!r}.')
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "when", as_schedule(self.when, default=DEFAULT_WHEN, argument="when"))

    @property
    def kind_names(self) -> tuple[str, ...]:
        """`kinds`, as checked."""
        return cast(tuple[str, ...], self.kinds)

    def is_due(self, step: int) -> bool:
        """Whether the schedule has this step."""
        return cast(Schedule, self.when)(step)

    def asked(self, kinds: tuple[str, ...] | None) -> Snapshots:
        """The same plan with other kinds, for a single request."""
        return self if kinds is None else replace(self, kinds=kinds)


def as_plan(value: Any) -> Snapshots:
    """Parse `snapshots=`: True is the default plan, None or False is only on request, a schedule is the default plan at
    those steps."""
    if value is None or value is False:
        return ON_DEMAND
    if value is True:
        return Snapshots()
    if isinstance(value, Snapshots):
        return value
    if isinstance(value, Schedule | int) or callable(value):
        return Snapshots(when=value)
    raise UsageError(
        f"snapshots= must be True, every(n), a function of the step or sonde.Snapshots(...); got {value!r}."
    )


def check_kinds(kinds: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Kinds requested for a single snapshot; None for those of the plan. "all" means all that the run can have."""
    if kinds is None:
        return None
    wanted = parse_kinds(kinds)
    return KINDS if wanted == ["all"] else _ordered(wanted, has_probe=False)


def _kinds(given: str | Iterable[str], *, has_probe: bool) -> tuple[str, ...]:
    wanted = parse_kinds(given)
    if wanted == ["all"]:
        return tuple(kind for kind in KINDS if kind != "probe" or has_probe)
    return _ordered(wanted, has_probe=has_probe)


def _ordered(wanted: list[str], *, has_probe: bool) -> tuple[str, ...]:
    return tuple(kind for kind in KINDS if kind in wanted or (kind == "probe" and has_probe))


ON_DEMAND: Final = Snapshots(when=False, on_finding=None)
"""The plan without `snapshots=`: none, unless requested."""
