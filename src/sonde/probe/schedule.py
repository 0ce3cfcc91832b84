"""Schedules: functions of the step that say when to record, such as `every(10)` or `first(100) | every(500)`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Final, TypeAlias

from sonde.errors import UsageError


class Schedule:
    """A function `step -> bool` that can be combined with others and prints as it was written.

    >>> schedule = first(2) | every(100)
    >>> [step for step in range(301) if schedule(step)]
    [0, 1, 100, 200, 300]
    >>> schedule
    first(2) | every(100)
    """

    __slots__ = ("_function", "_text", "share")

    def __init__(self, function: Callable[[int], bool], text: str, share: float = 1.0) -> None:
        self._function = function
        self._text = text
        self.share = share
        """The fraction of steps it selects in a long run; 1 if that is not known."""

    def __call__(self, step: int) -> bool:
        return self._function(step)

    def __or__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        share = min(self.share + other.share, 1.0)
        return Schedule(lambda step: self(step) or other(step), f"{self._text} | {other._text}", share)

    def __and__(self, other: Schedule) -> Schedule:
        if not isinstance(other, Schedule):
            return NotImplemented
        share = min(self.share, other.share)
        return Schedule(lambda step: self(step) and other(step), f"({self._text}) & ({other._text})", share)

    def __repr__(self) -> str:
        return self._text


When: TypeAlias = Schedule | bool | int | Callable[[int], bool] | None
"""A schedule; True for the default one; False or None for never; n for every n-th step; or a function of the step."""


def every(steps: int) -> Schedule:
    """Step 0 and each multiple of `steps`."""
    _check_count("every", steps)
    return Schedule(lambda step: step % steps == 0, f"every({steps})", 1 / steps)


def first(steps: int) -> Schedule:
    """The first `steps` steps."""
    _check_count("first", steps)
    return Schedule(lambda step: step < steps, f"first({steps})", 0.0)


def parse_schedule(text: str) -> Schedule:
    """A schedule as text, in a settings file or on the command line.

    >>> parse_schedule("first(100) | every(500)")
    first(100) | every(500)
    """
    try:
        return _parsed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise UsageError(
            f'"{text}" is not a schedule; write every(10), first(100) | every(500), a number, true or false.'
        ) from None


def _parsed(node: ast.expr) -> Schedule:
    match node:
        case ast.BinOp(left, ast.BitOr(), right):
            return _parsed(left) | _parsed(right)
        case ast.BinOp(left, ast.BitAnd(), right):
            return _parsed(left) & _parsed(right)
        case ast.Call(ast.Name("every"), [ast.Constant(int() as steps)], []):
            return every(steps)
        case ast.Call(ast.Name("first"), [ast.Constant(int() as steps)], []):
            return first(steps)
    raise ValueError(ast.dump(node))


def _check_count(name: str, steps: object) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"{name}() takes a number of steps, at least 1, for example {name}(10); got {steps!r}.")


ALWAYS: Final = Schedule(lambda _: True, "every(1)")
NEVER: Final = Schedule(lambda _: False, "never", 0.0)


def as_schedule(value: object, *, default: Schedule, argument: str) -> Schedule:
    """`True` is the default schedule, `False` or `None` is never, a number n is every(n), a function is itself."""
    if value is True:
        return default
    if value is False or value is None:
        return NEVER
    if isinstance(value, Schedule):
        return _with_first_step(value)
    if isinstance(value, int):
        return every(value)
    if callable(value):
        return _with_first_step(Schedule(lambda step: bool(value(step)), getattr(value, "__name__", "custom")))
    raise UsageError(f"{argument}= must be True, False, every(n), first(n) or a function of the step; got {value!r}.")


def _with_first_step(schedule: Schedule) -> Schedule:
    """People look at step 0 first."""
    return Schedule(lambda step: step == 0 or schedule(step), repr(schedule), schedule.share)


DEFAULT_ACTIVATIONS: Final = first(100) | every(10)
DEFAULT_INSPECT: Final = first(20) | every(10)
