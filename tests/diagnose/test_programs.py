"""Each rule against real training: a program that has its fault, the same one mended, and healthy ones that tempt it.

Of each rule one program runs here; `python benchmarks/diagnosis.py own` runs them all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sonde
from evidence import complaints
from faults.program import Observer, Program, programs, train
from sonde.diagnose.finding import Finding

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class Recorded(Observer):
    """What a user writes into a training loop, and no more."""

    def start(self, model: Any, optimizer: Any, loss_fn: Any, total_steps: int, val: Any = None) -> None:
        self.session = sonde.init(project="faults", verbose=False).watch(model, optimizer)

    def before_step(self, step: int, batch: Any) -> None:
        sonde.batch(*batch)

    def after_step(self, step: int, loss: float) -> None:
        sonde.log({"loss": loss})

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        sonde.log(metrics)

    def finish(self) -> list[Finding]:
        sonde.finish()
        run = sonde.open(self.session.path)
        found = run.findings()
        assert not [w for w in run.warnings if w.startswith("the rule ")]
        assert [text for finding in found for text in complaints(finding, run.window())] == []
        return found


def findings(program: Program, *, fixed: bool = False) -> list[Finding]:
    torch.set_num_threads(1)
    found: list[Finding] = train(program.build(0, fixed=fixed), Recorded())
    return [finding for finding in found if finding.severity >= "warning"]


def one_per_rule() -> list[Program]:
    """The first program of each label; a program with several labels serves all of them."""
    chosen: dict[str, Program] = {}
    for program in sorted(programs(), key=lambda p: p.id):
        for label in program.labels:
            chosen.setdefault(label, program)
    return list({p.id: p for p in chosen.values()}.values())


FAULTY = one_per_rule()
HEALTHY = [program for program in programs() if not program.labels]


@pytest.mark.parametrize("program", FAULTY, ids=lambda p: p.id)
def test_the_fault_is_named(program: Program) -> None:
    named = [finding.rule for finding in findings(program)]
    assert set(named) & program.labels, f"named {named}, planted {sorted(program.labels)}"


@pytest.mark.parametrize("program", [p for p in FAULTY if p.has_twin], ids=lambda p: p.id)
def test_the_same_program_mended_is_not_accused(program: Program) -> None:
    assert [(f.rule, f.message) for f in findings(program, fixed=True)] == []


@pytest.mark.parametrize("program", HEALTHY, ids=lambda p: p.id)
def test_a_healthy_program_is_not_accused(program: Program) -> None:
    assert [(f.rule, f.message) for f in findings(program)] == []
