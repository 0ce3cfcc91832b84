"""The event for a non-finite value in a forward pass: where it was first seen, and what is not known before that."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from sonde.reduce.inspect.finite import State
from sonde.schema.records import Event

MAX_SITES: Final = 8
PRESERVING: Final = frozenset(
    {
        "Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "StochasticDepth",
        "DropPath", "Identity", "Flatten", "Unflatten", "ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "Sigmoid", "Tanh",
        "MaxPool1d", "MaxPool2d", "MaxPool3d",
    }
)  # fmt: skip
"""Modules that do not produce a non-finite value from finite ones."""


class Look(NamedTuple):
    """One checked tensor: its module and its micro-batch."""

    site: str
    role: str
    """"output" or "input" of the module, or "copy" for an input that autocast has cast."""
    micro_batch: int
    is_leaf: bool
    is_root: bool
    """Whether the model returned it."""
    module_type: str = ""
    is_known: bool = True
    """Whether the tensor still existed, unchanged, when the pass was over."""
    inputs: tuple[int, ...] = ()
    """For an output: the module's inputs, as places among the checks of the pass."""


Pass = tuple[list[Look], list[State]]
"""The checks of a forward pass, in forward order."""


def nonfinite_event(passes: list[Pass], step: int, now: float) -> Event | None:
    """The event for non-finite values, in forward order; None if there are none that matter.

    Infinity alone, inside a model, is what masks are made of: it matters once it becomes NaN or leaves the model.
    """
    bad = [
        (look, state) for looks, states in passes for look, state in zip(looks, states, strict=True) if _is_bad(state)
    ]
    has_nan = any(state is not None and math.isnan(state) for _, state in bad)
    if not has_nan and not any(look.is_root for look, _ in bad):
        return None
    looks, states = next(one for one in passes if any(map(_is_bad, one[1])))
    at = next(place for place, state in enumerate(states) if _is_bad(state))
    first, before = looks[at], _unknown_before(at, looks, states)
    unknown, role = [looks[place] for place in before], "output" if first.role == "output" else "input"
    freed = list(dict.fromkeys(look.site for look in unknown))[:MAX_SITES]
    details = {
        "site": first.site,
        "role": role,
        "came_with_data": role == "input" and not any(look.role == "output" for look in looks[:at]),
        "after": _last_finite([*before, at][0], looks, states),
        "unknown": freed,
        "suspect": _suspect(first, unknown),
        "micro_batch": first.micro_batch,
        "value": "inf" if states[at] == math.inf else "nan",
        "sites": list(dict.fromkeys(look.site for look, _ in bad if look.role == "output" and look.is_leaf))[
            :MAX_SITES
        ],
        "num_bad": len(bad),
        "num_seen": sum(len(looks) for looks, _ in passes),
        "num_unknown": sum(state is None for _, states in passes for state in states),
    }
    where = f"first in the {role} of {first.site}"
    if unknown:
        where = f"{where}, unless it came from {', '.join(freed)}, freed before the check"
    message = f"{'NaN' if has_nan else 'infinity'} at step {step}, {where} (micro-batch {first.micro_batch})"
    return Event(type="nonfinite", message=message, step=step, time=now, severity="critical", details=details)


def _is_bad(state: State) -> bool:
    return state is not None and not math.isfinite(state)


def _unknown_before(at: int, looks: list[Look], states: list[State]) -> list[int]:
    """Outputs that were freed or overwritten and may have contained the value: those after the last finite tensor, and
    those of modules parallel to this one, since its parent last computed something itself that was finite. There are
    several because the last finite tensor may belong to another branch: an attention has three projections. None if a
    module without submodules had finite inputs: then it is the one."""
    first = looks[at]
    if (
        first.role == "output"
        and first.is_leaf
        and first.inputs
        and all(states[place] == 0.0 for place in first.inputs)
    ):
        return []
    parent = f"{first.site.rpartition('.')[0]}." if first.is_leaf else ""
    found: list[int] = []
    is_next = True
    for place in reversed(range(at)):
        look, state = looks[place], states[place]
        is_next = is_next and state is None
        is_beside = len(parent) > 1 and look.site.startswith(parent) and look.role != "input"
        if not is_next and not is_beside:
            break
        if state is None and look.role == "output":
            found.insert(0, place)
    return found


def _suspect(first: Look, unknown: list[Look]) -> str:
    """The one module that can have produced the value, if all others pass finite values on; otherwise empty."""
    able = [look for look in unknown if look.module_type not in PRESERVING]
    is_first_able = first.role == "output" and first.is_leaf and first.module_type not in PRESERVING
    return able[0].site if len(able) == 1 and able[0].is_leaf and not is_first_able else ""


def _last_finite(at: int, looks: list[Look], states: list[State]) -> str | None:
    """The last module before it with a finite output."""
    return next(
        (looks[place].site for place in reversed(range(at)) if looks[place].role == "output" and states[place] == 0.0),
        None,
    )
