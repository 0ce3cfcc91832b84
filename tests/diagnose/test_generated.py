"""The generated programs: they are what they say, the split does not move, and the scores count what they should."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import scores
from programs.catalogue import Program, programs
from programs.fault import all_faults
from programs.loop import train
from programs.models import ARCHITECTURES
from programs.setup import build
from programs.split import is_name_held_out
from programs.tasks import TASKS
from scores import Row
from sonde.diagnose.check import all_rules

FORESEEN = {"no_labels", "wrong_label_shift", "uneven_learning_rates"}
"""Labels for which no rule exists yet."""


def _planted(fault: str) -> Program:
    return next(p for p in programs() if p.fault and p.fault.name == fault)


def test_there_are_enough_programs_of_every_kind() -> None:
    faults = Counter(p.fault.name for p in programs() if p.fault)
    assert sum(faults.values()) >= 250
    assert sum(p.fault is None for p in programs()) >= 120
    assert faults["divergence"] >= 15
    assert sum(num for name, num in faults.items() if name.startswith("frozen")) >= 10
    assert {p.architecture for p in programs()} == set(ARCHITECTURES)
    assert {p.task for p in programs()} == set(TASKS)


def test_every_label_is_a_rule() -> None:
    for fault in all_faults().values():
        assert fault.labels - FORESEEN <= set(all_rules()), fault.name
        assert fault.also - FORESEEN <= set(all_rules()), fault.name


def test_the_held_out_names_are_fixed() -> None:
    assert {name for name in ARCHITECTURES if is_name_held_out(name)} == {
        *("normed_mlp", "residual_mlp", "mixture", "decoder", "recommender"),
    }
    assert {name for name in TASKS if is_name_held_out(name)} == {
        *("reconstruction", "contrastive", "images", "clicks", "policy"),
    }


def test_a_program_and_its_twin_start_from_the_same_weights_and_batches() -> None:
    program = _planted("lr_too_high")
    faulty, twin = build(program.setup()), build(program.setup(fixed=True))
    for own, other in zip(faulty.model.parameters(), twin.model.parameters(), strict=True):
        assert own.equal(other)
    assert all(next(faulty.batches)[0].equal(next(twin.batches)[0]) for _ in range(3))
    assert faulty.setup.rate > twin.setup.rate


@pytest.mark.slow
def test_a_program_is_trained_and_its_outcome_is_measured(tmp_path: Path) -> None:
    program = _planted("degenerate_inputs")
    setup, repaired = program.setup(), program.setup(fixed=True)
    _, faulty = train(setup, tmp_path / "faulty")
    run, twin = train(repaired, tmp_path / "twin")
    assert any(run.iterdir())
    assert scores.had_effect("score", faulty.as_dict(), twin.as_dict())
    assert scores.is_healthy(twin.as_dict())
    assert not scores.had_effect("score", twin.as_dict(), twin.as_dict())


def _row(kind: str, labels: str = "", named: str = "", stated: float = 0.8) -> Row:
    names = named.split()
    return Row(
        id="x", kind=kind, labels=labels.split(), also=["loss_spikes"], named=names, roots=names[:1],
        confidence=[stated] * len(names[:1]), fault="f", architecture="a", task="t", optimizer="o", style="s",
        held_out=False,
    )  # fmt: skip


def test_scores_count_what_was_named_first_and_what_was_named_wrongly() -> None:
    rows = [
        _row("faulty", "nan_inf", "nan_inf"),
        _row("faulty", "nan_inf", "lr_too_low nan_inf"),
        _row("faulty", "nan_inf", "lr_too_low"),
        _row("faulty", "nan_inf"),
        _row("twin"),
        _row("twin", named="lr_too_low"),
        _row("healthy"),
    ]
    found = scores.summarize(rows)
    assert found["detection"][0] == 0.75
    assert found["diagnosis"][0] == 0.5
    assert found["root first"][0] == 0.25
    assert found["false alarms, twins"][0] == 0.5
    assert found["false alarms, healthy"][0] == 0
    middle, low, high = found["diagnosis"]
    assert low < middle < high


def test_calibration_compares_what_was_stated_with_what_was_right() -> None:
    rows = [_row("faulty", "nan_inf", "nan_inf", 0.95)] * 5 + [_row("healthy", named="nan_inf", stated=0.95)] * 5
    found = scores.calibration(rows)
    assert found["findings"] == 10
    assert found["expected calibration error"] == pytest.approx(0.45)


def test_a_run_that_ends_as_nan_was_harmed() -> None:
    good = {"scores": [0.5, 0.9], "final_loss": 0.1, "kept_mib": 0.0}
    assert scores.had_effect("score", {**good, "final_loss": np.nan}, good)
    assert not scores.is_healthy({**good, "final_loss": np.nan})
    assert scores.had_effect("memory", {**good, "kept_mib": 9.0}, good)
