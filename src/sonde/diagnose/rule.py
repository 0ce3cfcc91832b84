"""A rule: a pure function of a window that yields findings, registered with the data it needs and what it causes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

from sonde.diagnose.confidence import confidences
from sonde.diagnose.finding import Evidence, Finding, Severity
from sonde.diagnose.grounding import grounded
from sonde.schema.window import Window

__all__ = ["RULES", "Evidence", "Found", "Rule", "Window", "rule"]


@dataclass(frozen=True, slots=True)
class Found:
    """A finding as a rule yields it. Its registration and the window supply the rest of the `Finding`."""

    message: str
    _: KW_ONLY
    step: int
    confidence: float
    remedy: str
    sites: Sequence[str] = ()
    evidence: Sequence[Evidence] = ()
    last_step: int | None = None
    """None means the last step of the window."""
    severity: str | None = None
    """None means the rule's default."""
    traceback: str = ""


RuleFunction = Callable[[Window], Iterator[Found]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered rule. To add one, add a file to `rules/`."""

    name: str
    severity: Severity
    needs: tuple[str, ...]
    """Patterns of the series it reads (`grad/*/norm`). Scalars and inspections are always available."""
    causes: tuple[str, ...]
    """Names of the rules whose findings this fault explains."""
    references: tuple[str, ...]
    function: RuleFunction
    is_measured: bool = False
    """Whether a finding keeps its severity when its cause is known. Measured faults (dead units, vanishing gradients)
    exist whatever their cause; inferred ones (a learning rate too low) are mostly wrong once a cause is known."""
    like: str = ""
    """The name of another rule: what explains its findings explains these, too."""

    @property
    def meaning(self) -> str:
        return (self.function.__doc__ or "").strip()

    def explains(self, other: Rule) -> bool:
        """Whether this fault may be the cause of another."""
        return other is not self and (other.name in self.causes or other.like in self.causes)

    def __call__(self, window: Window) -> Iterator[Finding]:
        for found in self.function(window):
            yield Finding(
                rule=self.name,
                severity=self.severity if found.severity is None else Severity(found.severity),
                confidence=confidences().calibrated(self.name, found.confidence),
                step=int(found.step),
                last_step=window.last_step if found.last_step is None else int(found.last_step),
                message=found.message,
                sites=tuple(found.sites),
                evidence=tuple(grounded(evidence, window) for evidence in found.evidence),
                remedy=found.remedy,
                references=self.references,
                traceback=found.traceback,
            )


RULES: Final[dict[str, Rule]] = {}


def rule(
    *,
    severity: str = "warning",
    needs: tuple[str, ...] = (),
    causes: tuple[str, ...] = (),
    references: tuple[str, ...] = (),
    is_measured: bool = False,
    like: str = "",
) -> Callable[[RuleFunction], Rule]:
    """Register a rule under its function's name. The first line of its docstring says what is wrong.

    @rule(severity="warning", needs=("grad/*/norm",), causes=("underfitting",))
    def vanishing_gradients(window):
        ...
        yield Found("Gradients vanish on the way to layers.0.", step=0, confidence=0.8, remedy="…")
    """

    def register(function: RuleFunction) -> Rule:
        name = function.__name__
        assert name not in RULES, f"two rules named {name}"
        RULES[name] = Rule(name, Severity(severity), needs, causes, references, function, is_measured, like)
        return RULES[name]

    return register
