"""The comparison that decided a rule, found without changing the rule.

The source of the rule is compiled once more, with every comparison with one of its constants replaced by a call that
notes both sides. What is noted last before the rule returns without a finding is what rejected it.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from sonde.diagnose.page import thresholds
from sonde.diagnose.rule import Found, Rule
from sonde.schema.window import Window

_NOTE: Final = "__note__"
_SIGNS: Final[dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], Any]]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
}
_OPPOSITE: Final = {"<": "at least", "<=": "above", ">": "at most", ">=": "below"}


@dataclass(frozen=True, slots=True)
class Decision:
    """One comparison of a rule with one of its constants."""

    what: str
    """The compared expression, as in the source."""
    value: float
    sign: str
    threshold: str
    """Name of the constant."""
    limit: float
    meaning: str
    """What the constant means, from its documentation."""
    is_true: bool

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def relation(self) -> str:
        """How the value relates to the limit, in words: "at most", "above"."""
        return (
            {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}[self.sign]
            if self.is_true
            else (_OPPOSITE[self.sign])
        )


def decisions(rule: Rule, window: Window) -> list[Decision]:
    """The comparisons that a rule made for this window, in order; empty if it cannot be followed or made none."""
    try:
        function, noted = _compiled(rule)
    except (OSError, TypeError, SyntaxError):  # no source, as in a frozen program
        return []
    noted.clear()
    with np.errstate(all="ignore"):
        for _ in function(window):
            pass
    found, known = list(noted), {one.name: one.meaning for one in thresholds(rule.name)}
    noted.clear()
    return [
        Decision(what, value, sign, name, limit, known.get(name, ""), is_true)
        for what, value, sign, name, limit, is_true in found
    ]


@cache
def _compiled(rule: Rule) -> tuple[Callable[[Window], Iterator[Found]], list[tuple[Any, ...]]]:
    """The rule's function with its comparisons noted, and the list of notes."""
    module = inspect.getmodule(rule.function)
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    tree = ast.fix_missing_locations(_Noting({one.name for one in thresholds(rule.name)}).visit(tree))
    notes: list[tuple[Any, ...]] = []

    def note(what: str, sign: str, name: str, value: Any, limit: Any) -> Any:
        compare = next(function for text, function in _SIGNS.values() if text == sign)
        result = compare(value, limit)
        single = _deciding(value, sign)
        if single is not None and np.ndim(limit) == 0:
            notes.append((what, single, sign, name, float(limit), bool(compare(single, limit))))
        return result

    namespace = {"__name__": module.__name__, _NOTE: note}
    exec(compile(tree, module.__file__ or rule.name, "exec"), namespace)  # noqa: S102 - the source of our own rule
    return namespace[rule.name], notes  # type: ignore[return-value]


def _deciding(value: Any, sign: str) -> float | None:
    """The value itself; of an array the one that comes closest to fulfilling the comparison."""
    try:
        numbers = np.asarray(value, float)
    except (TypeError, ValueError):
        return None
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return None
    return float(finite.max() if sign in (">", ">=") else finite.min())


class _Noting(ast.NodeTransformer):
    """Replaces `x > LIMIT` by a call that notes both sides, and takes the registration off the rule."""

    _FLIPPED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}

    def __init__(self, constants: set[str]) -> None:
        self._constants = constants

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [d for d in node.decorator_list if not _is_registration(d)]
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) != 1 or type(node.ops[0]) not in _SIGNS:
            return node
        sign, left, right = _SIGNS[type(node.ops[0])][0], node.left, node.comparators[0]
        if not (name := self._named(right)):
            name, left, right, sign = self._named(left), right, left, self._FLIPPED[sign]
        if not name:
            return node
        texts: list[ast.expr] = [ast.Constant(ast.unparse(left)), ast.Constant(sign), ast.Constant(name)]
        return ast.Call(ast.Name(_NOTE, ast.Load()), [*texts, left, right], [])

    def _named(self, node: ast.expr) -> str:
        """The constant that an expression is made of: `LIMIT`, or `LIMIT * x`."""
        names = [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in self._constants]
        return names[0] if names else ""


def _is_registration(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rule"
