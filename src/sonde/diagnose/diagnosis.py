"""The diagnosis of a window: findings, health, and what could not be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Final

from sonde.diagnose.check import all_rules, check, required_series
from sonde.diagnose.finding import Finding, Severity, count_severities
from sonde.diagnose.health import REQUIRED_SERIES, Health, health
from sonde.diagnose.measures.loss import loss_name, validation
from sonde.diagnose.mute import Muted, separate
from sonde.diagnose.rule import Rule
from sonde.schema.mutes import MUTE, Mute, parse_mutes
from sonde.schema.window import Window


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings and health of a run, and what could not be checked."""

    window: Window
    findings: tuple[Finding, ...]
    """Most likely root cause first; its symptoms are in its `cause_of` and again at the end of this tuple."""
    health: Health
    num_rules: int
    blind: tuple[str, ...]
    """Rules for which no data was recorded."""
    failed: tuple[str, ...]
    """Rules that raised and were skipped."""
    gaps: tuple[Gap, ...]
    muted: tuple[Muted, ...] = ()
    """Findings that the user has muted; they count nowhere else."""

    @property
    def roots(self) -> list[Finding]:
        """Warnings and critical findings that no other finding explains."""
        return [f for f in self.findings if f.severity > Severity.INFO and not self.is_explained(f)]

    @property
    def remarks(self) -> list[Finding]:
        """Findings of severity info that no other finding explains."""
        return [f for f in self.findings if f.severity == Severity.INFO and not self.is_explained(f)]

    def is_explained(self, finding: Finding) -> bool:
        """Whether another finding caused this one."""
        return any(
            (finding.rule, finding.sites) == (symptom.rule, symptom.sites)
            for cause in self.findings
            for symptom in cause.cause_of
        )

    @property
    def is_blind(self) -> bool:
        """Whether nothing was recorded that the rules check, so that the absence of findings means nothing."""
        return not self.findings and not self.muted and len(self.gaps) == len(_GAPS)

    @property
    def is_critical(self) -> bool:
        return any(finding.severity == Severity.CRITICAL for finding in self.findings)

    def counts(self) -> dict[str, int]:
        """The number of findings of each severity."""
        return count_severities(finding.severity for finding in self.findings)


def all_required_series() -> tuple[str, ...]:
    """The patterns of the series that rules and health read, without duplicates."""
    return tuple(dict.fromkeys((*required_series(), *REQUIRED_SERIES)))


def diagnose(
    window: Window,
    rules: Iterable[Rule] | None = None,
    *,
    on_error: Callable[[str, Exception], None] | None = None,
    mutes: Iterable[Mute] = (),
) -> Diagnosis:
    """Run the rules over a window. A rule that raises is reported and skipped. The run's own mutes apply, too."""
    chosen = tuple(all_rules().values() if rules is None else rules)
    failed: list[str] = []

    def skipped(name: str, error: Exception) -> None:
        failed.append(name)
        if on_error is not None:
            on_error(name, error)

    found = check(window, chosen, on_error=skipped)
    findings, muted = separate(found, (*mutes, *_own_mutes(window)), datetime.now(UTC).date())
    return Diagnosis(
        window=window,
        findings=tuple(findings),
        health=health(window, findings),
        num_rules=len(chosen),
        blind=tuple(blind(window, chosen)),
        failed=tuple(failed),
        gaps=tuple(gaps(window)),
        muted=tuple(muted),
    )


def _own_mutes(window: Window) -> tuple[Mute, ...]:
    """The mutes that were set when the run was recorded; a run folder may come from anywhere."""
    try:
        return parse_mutes(window.facts.get(MUTE) or ())
    except ValueError:
        return ()


@dataclass(frozen=True, slots=True)
class Gap:
    """Data that was not recorded, what cannot be checked without it, and the call that records it."""

    what: str
    hides: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def _has(*patterns: str) -> Callable[[Window], bool]:
    return lambda window: any(window.names(pattern) for pattern in patterns)


_GAPS: Final[tuple[tuple[Callable[[Window], bool], Gap], ...]] = (
    (lambda w: loss_name(w) is not None, Gap("the loss", "whether the model learns", 'sonde.log({"loss": loss})')),
    (
        lambda w: len(validation(w)[0]) > 0,
        Gap("a validation loss", "overfitting", 'sonde.log({"val_loss": val_loss})'),
    ),
    (_has("grad"), Gap("gradients", "gradient flow", "sonde.watch(model, optimizer)")),
    (
        _has("update/*/ratio", "update/*/norm"),
        Gap("updates", "learning rate and optimizer steps", "sonde.watch(model, optimizer)"),
    ),
    (_has("act"), Gap("activations", "layer outputs", "sonde.watch(model, activations=True)")),
    (
        _has("unit", "attn", "rnn", "data", "model"),
        Gap("inspections", "data, dead units and attention", "sonde.watch(model, inspect=True)"),
    ),
)


def gaps(window: Window) -> list[Gap]:
    """Data that was not recorded, most important first."""
    return [gap for is_there, gap in _GAPS if not is_there(window)]


def blind(window: Window, rules: Iterable[Rule]) -> list[str]:
    """Rules that need recorded series and found none of them."""
    return [rule.name for rule in rules if rule.needs and not any(window.names(need) for need in rule.needs)]
