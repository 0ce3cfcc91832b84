"""The contents of a report, gathered once: facts, findings, health, the standard analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sonde.diagnose.diagnosis import Diagnosis
from sonde.distribution import version
from sonde.run import Run
from sonde.schema.window import Window
from sonde.show.analyses.analysis import Analysis
from sonde.show.analyses.convergence import convergence
from sonde.show.analyses.gradient_flow import gradient_flow
from sonde.show.analyses.overfitting import overfitting
from sonde.show.analyses.weights import weights
from sonde.show.coverage import coverage_sentences, overhead_sentence
from sonde.show.diagnosis import health_of, what_was_checked
from sonde.show.export.source import run_facts
from sonde.show.summary import duration_s
from sonde.show.web.caches.diagnoses import MAX_ROWS, judge
from sonde.show.web.runs import Entry, run_key

STAGES: Final = ("findings", "convergence", "gradient flow", "weights", "overfitting")
OnStage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """The contents of a report of a run."""

    facts: Mapping[str, Any]
    diagnosis: Diagnosis
    analyses: tuple[Analysis, ...]

    @property
    def checked(self) -> str:
        """Sentences on what the rules checked."""
        if not self.diagnosis.num_rules:
            return "The run is too long to check again; these are the findings made during training."
        return what_was_checked(self.diagnosis)

    def as_dict(self) -> dict[str, Any]:
        """The output of `sonde report --format json`."""
        found = self.diagnosis
        return {
            "sonde_report": 1,
            **self.facts,
            "health": health_of(found),
            "counts": found.counts(),
            "findings": [finding.as_dict() for finding in found.findings],
            "checked": self.checked,
            "analyses": [analysis.as_dict() for analysis in self.analyses],
        }


def gather(run: Run, on_stage: OnStage = lambda _: None) -> Report:
    """Read and diagnose a run; `on_stage` is called with the name of each stage."""
    on_stage(STAGES[0])
    window = run.window(())
    diagnosis = _judge(run, window)
    on_stage(STAGES[1])
    analyses = [convergence(window)]
    on_stage(STAGES[2])
    analyses.append(gradient_flow(run))
    on_stage(STAGES[3])
    analyses.append(weights(run))
    on_stage(STAGES[4])
    analyses.append(overfitting(window))
    return Report(_facts(run), diagnosis, tuple(analyses))


def _judge(run: Run, window: Window) -> Diagnosis:
    """The diagnosis by all rules; for a run with too many values, the live findings."""
    if run.num_rows <= MAX_ROWS:
        return run.diagnosis()
    judged = judge(Entry(run_key(run.path), run.path, run.path.parent), run)
    return Diagnosis(window, judged.findings, judged.health, num_rules=0, blind=(), failed=(), gaps=())


def _facts(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    return {
        "sonde_version": version(),
        **run_facts(run),
        "duration_s": duration_s(run),
        "num_sites": run.sites().num_rows,
        "command": list(manifest.command),
        "host": manifest.host,
        "overhead": overhead_sentence(manifest.facts.get("overhead")),
        "coverage": coverage_sentences(run.coverage()),
    }
