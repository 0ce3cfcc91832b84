"""All that a report says of a run, gathered once: facts, findings, health, the standard analyses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from sonde.diagnose.diagnosis import Diagnosis
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
    """A run, judged."""

    facts: Mapping[str, Any]
    diagnosis: Diagnosis
    analyses: tuple[Analysis, ...]

    @property
    def checked(self) -> str:
        """How far the silence of the rules can be trusted."""
        if not self.diagnosis.num_rules:
            return "the run is too long to be judged again; these are the findings of the rules that ran with it"
        return what_was_checked(self.diagnosis)

    def as_dict(self) -> dict[str, Any]:
        """What `sonde report --format json` writes."""
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
    """Read and judge a run; `on_stage` hears what is being done."""
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
    """All rules over the whole run; of one that holds too many values, what was found while it trained."""
    if run.num_rows <= MAX_ROWS:
        return run.diagnosis()
    judged = judge(Entry(run_key(run.path), run.path, run.path.parent), run)
    return Diagnosis(window, judged.findings, judged.health, num_rules=0, blind=(), failed=(), gaps=())


def _facts(run: Run) -> dict[str, Any]:
    manifest = run.manifest
    return {
        "sonde_version": version("sonde"),
        **run_facts(run),
        "duration_s": duration_s(run),
        "num_sites": run.sites().num_rows,
        "command": list(manifest.command),
        "host": manifest.host,
        "overhead": overhead_sentence(manifest.facts.get("overhead")),
        "coverage": coverage_sentences(run.coverage()),
    }
