"""Which whole tensors to keep, and when: what `watch(..., snapshots=...)` takes, made into one value. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from sonde.errors import UnknownNameError, UsageError
from sonde.probe.schedule import Schedule, as_schedule, every
from sonde.schema.snapshots.tensors import SNAPSHOT_KINDS as KINDS

DEFAULT_WHEN: Final = every(500)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshots:
    """What a snapshot holds, when one is taken, and where it goes. Every field has a default.

    sonde.watch(model, optimizer, snapshots=sonde.Snapshots(when=sonde.every(200), kinds=("param", "grad", "optim")))
    """

    when: Any = DEFAULT_WHEN
    """A schedule, a number n for every n-th step, a function of the step, or False for only when asked."""
    kinds: tuple[str, ...] = ("param",)
    """Of `param` (with the buffers that are saved), `grad`, `act`, `optim`, `probe` and `batch`; or "all"."""
    sites: Any = "*"
    """A glob, a regular expression, a module type, a list of these, or a function; of what is watched."""
    store: str = "zarr"
    """"zarr", "icechunk", "memory", or the address of a bucket."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For the store."""
    probe: Any = None
    """A batch whose activations are kept in each snapshot: a tensor, a tuple of arguments, or a dict of keywords."""
    on_finding: Literal["critical", "warning"] | None = "critical"
    """Also take one when a rule first finds something this grave."""
    at_once: bool = False
    """Copy everything at the optimizer step itself, and let training wait for it: for code that writes to parameters
    behind autograd's back while the model runs."""

    def __post_init__(self) -> None:
        given: Any = self.kinds
        kinds = _kinds(given, has_probe=self.probe is not None)
        if self.probe is None and "probe" in kinds:
            raise UsageError('kind "probe" needs a batch to probe with:  Snapshots(kinds=..., probe=batch)')
        if self.on_finding not in ("critical", "warning", None):
            raise UsageError(f'on_finding= takes "critical", "warning" or None; got {self.on_finding!r}.')
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "when", as_schedule(self.when, default=DEFAULT_WHEN, argument="when"))

    def asked(self, kinds: tuple[str, ...] | None) -> Snapshots:
        """The same with other kinds, as asked for once."""
        return self if kinds is None else replace(self, kinds=kinds)


def as_plan(value: Any) -> Snapshots:
    """`True` is the default plan, None or False is only when asked, a schedule is the default plan at those steps."""
    if value is None or value is False:
        return ON_DEMAND
    if value is True:
        return Snapshots()
    if isinstance(value, Snapshots):
        return value
    if isinstance(value, Schedule | int) or callable(value):
        return Snapshots(when=value)
    raise UsageError(f"snapshots= takes True, every(n), a function of the step or sonde.Snapshots(...); got {value!r}.")


def check_kinds(kinds: Any) -> tuple[str, ...] | None:
    """Kinds that somebody asked for once; None for those of the plan. All are all that the run can have."""
    if kinds is None:
        return None
    return KINDS if kinds == "all" or list(kinds) == ["all"] else _kinds(kinds, has_probe=False)


def _kinds(given: Any, *, has_probe: bool) -> tuple[str, ...]:
    wanted = [given] if isinstance(given, str) else list(given)
    if wanted == ["all"]:
        return tuple(kind for kind in KINDS if kind != "probe" or has_probe)
    for kind in wanted:
        if kind not in KINDS:
            raise UnknownNameError("kind of snapshot", str(kind), KINDS)
    if not wanted:
        raise UsageError(f"kinds= is empty; a snapshot holds at least one of {', '.join(KINDS)}.")
    return tuple(kind for kind in KINDS if kind in wanted or (kind == "probe" and has_probe))


ON_DEMAND: Final = Snapshots(when=False, on_finding=None)
"""What is meant when nothing was said: none, unless somebody asks."""
