"""All that can be said of a window at once: findings, health, and how far the silence of the rules can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Final

from sonde.diagnose.check import all_rules, check, required_series
from sonde.diagnose.finding import Finding, Severity, count_severities
from sonde.diagnose.health import REQUIRED_SERIES, Health, health
from sonde.diagnose.measures.loss import loss_name, validation
from sonde.diagnose.rule import Rule
from sonde.schema.window import Window


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong, how healthy it was, and what could not be seen."""

    window: Window
    findings: tuple[Finding, ...]
    """The most likely root first; symptoms of a root are in its `cause_of`, and at the end."""
    health: Health
    num_rules: int
    blind: tuple[str, ...]
    """Rules that had nothing to look at."""
    failed: tuple[str, ...]
    """Rules that raised and were skipped."""
    gaps: tuple[Gap, ...]

    @property
    def roots(self) -> list[Finding]:
        """Findings that no other finding explains, remarks left out."""
        return [f for f in self.findings if f.severity > Severity.INFO and not self.is_explained(f)]

    @property
    def remarks(self) -> list[Finding]:
        """Remarks that stand under no root."""
        return [f for f in self.findings if f.severity == Severity.INFO and not self.is_explained(f)]

    def is_explained(self, finding: Finding) -> bool:
        """Whether another finding brought this one about."""
        return any(
            (finding.rule, finding.sites) == (symptom.rule, symptom.sites)
            for cause in self.findings
            for symptom in cause.cause_of
        )

    @property
    def is_critical(self) -> bool:
        return any(finding.severity == Severity.CRITICAL for finding in self.findings)

    def counts(self) -> dict[str, int]:
        """How many findings of each severity."""
        return count_severities(finding.severity for finding in self.findings)


def all_required_series() -> tuple[str, ...]:
    """The patterns over series that rules and health look at, each once."""
    return tuple(dict.fromkeys((*required_series(), *REQUIRED_SERIES)))


def diagnose(
    window: Window,
    rules: Iterable[Rule] | None = None,
    *,
    on_error: Callable[[str, Exception], None] | None = None,
) -> Diagnosis:
    """Run the rules over a window. One that raises is reported and skipped."""
    chosen = tuple(all_rules().values() if rules is None else rules)
    failed: list[str] = []

    def skipped(name: str, error: Exception) -> None:
        failed.append(name)
        if on_error is not None:
            on_error(name, error)

    findings = check(window, chosen, on_error=skipped)
    return Diagnosis(
        window=window,
        findings=tuple(findings),
        health=health(window, findings),
        num_rules=len(chosen),
        blind=tuple(blind(window, chosen)),
        failed=tuple(failed),
        gaps=tuple(gaps(window)),
    )


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that is not in the record, what cannot be told without it, and how to have it next time."""

    what: str
    hides: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def _has(*patterns: str) -> Callable[[Window], bool]:
    return lambda window: any(window.names(pattern) for pattern in patterns)


_GAPS: Final[tuple[tuple[Callable[[Window], bool], Gap], ...]] = (
    (lambda w: loss_name(w) is not None, Gap("the loss", "whether it learns", 'sonde.log({"loss": loss})')),
    (
        lambda w: len(validation(w)[0]) > 0,
        Gap("a validation loss", "overfitting", 'sonde.log({"val_loss": val_loss})'),
    ),
    (_has("grad"), Gap("gradients", "how they flow", "sonde.watch(model, optimizer)")),
    (
        _has("update/*/ratio", "update/*/norm"),
        Gap("updates", "what the optimizer does", "sonde.watch(model, optimizer)"),
    ),
    (_has("act"), Gap("activations", "what units do", "sonde.watch(model, activations=True)")),
    (
        _has("unit", "attn", "rnn", "data", "model"),
        Gap("inspections", "data, dead units, attention", "sonde.watch(model, inspect=True)"),
    ),
)


def gaps(window: Window) -> list[Gap]:
    """What was not recorded, most important first."""
    return [gap for is_there, gap in _GAPS if not is_there(window)]


def blind(window: Window, rules: Iterable[Rule]) -> list[str]:
    """Rules of whose series not one is there."""
    return [rule.name for rule in rules if rule.needs and not any(window.names(need) for need in rule.needs)]
