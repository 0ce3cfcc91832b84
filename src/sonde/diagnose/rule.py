"""A rule: a pure function of a window that yields findings, with its name, what it needs and what it brings about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from sonde.diagnose.finding import Evidence, Finding, Severity
from sonde.schema.window import Window

RuleFunction = Callable[[Window], Iterator[Finding]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as it is registered. To add one, add one file to `rules/`."""

    name: str
    severity: Severity
    needs: tuple[str, ...]
    """Patterns over series (`grad/*/norm`) it looks at. Scalars and inspections are always there."""
    causes: tuple[str, ...]
    """Rules whose findings this fault explains."""
    references: tuple[str, ...]
    function: RuleFunction
    is_measured: bool = False
    """Whether a finding stays what it is beside its cause. What is measured (dead units, vanishing gradients) is there
    whatever brought it about; what is inferred (a learning rate too low) is mostly wrong once a cause is known."""

    @property
    def meaning(self) -> str:
        return (self.function.__doc__ or "").strip()

    def __call__(self, window: Window) -> Iterator[Finding]:
        return self.function(window)


RULES: Final[dict[str, Rule]] = {}


def rule(
    *,
    severity: str = "warning",
    needs: tuple[str, ...] = (),
    causes: tuple[str, ...] = (),
    references: tuple[str, ...] = (),
    is_measured: bool = False,
) -> Callable[[RuleFunction], Rule]:
    """Register a rule under its function's name; its docstring says in one line what is wrong.

    @rule(severity="warning", needs=("grad/*/norm",), causes=("underfitting",))
    def vanishing_gradients(window):
        ...
        yield found(window, "vanishing_gradients", ...)
    """

    def register(function: RuleFunction) -> Rule:
        name = function.__name__
        assert name not in RULES, f"two rules named {name}"
        RULES[name] = Rule(name, Severity(severity), needs, causes, references, function, is_measured)
        return RULES[name]

    return register


def found(
    window: Window,
    name: str,
    message: str,
    *,
    step: int,
    confidence: float,
    remedy: str,
    sites: tuple[str, ...] | list[str] = (),
    evidence: tuple[Evidence, ...] | list[Evidence] = (),
    last_step: int | None = None,
    severity: str | None = None,
) -> Finding:
    """A finding of the rule of that name, with what the rule's registration already says."""
    known = RULES[name]
    return Finding(
        rule=name,
        severity=Severity(severity) if severity is not None else known.severity,
        confidence=confidence,
        step=int(step),
        last_step=window.last_step if last_step is None else int(last_step),
        message=message,
        sites=tuple(sites),
        evidence=tuple(evidence),
        remedy=remedy,
        references=known.references,
    )
