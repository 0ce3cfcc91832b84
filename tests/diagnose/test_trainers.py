"""A few of the programs in other people's trainers; `python benchmarks/diagnosis.py trainers` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sonde
from trainers.program import REGISTRY, programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAULTY = {
    "plain": ("plain_zero_grad_between_micro_batches", "plain_same_batch", "plain_distil_teacher_softmax_twice"),
    "huggingface": ("huggingface_warmup_never_ends", "huggingface_labels_shifted_twice"),
}
HEALTHY = {"plain": ("h_plain_class_weights", "h_plain_short")}


def named(module: str, id: str, folder: Path, *, fixed: bool = False) -> list[str]:
    if module == "huggingface":
        pytest.importorskip("transformers")
    programs(module)
    torch.set_num_threads(1)
    run = sonde.open(REGISTRY[id].run(folder, fixed=fixed))
    assert not [warning for warning in run.warnings if warning.startswith("the rule ")]
    return [finding.rule for finding in run.findings() if finding.severity >= "warning"]


def pairs(chosen: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(module, id) for module, ids in chosen.items() for id in ids]


@pytest.mark.parametrize(("module", "id"), pairs(FAULTY))
def test_the_fault_is_named_first(module: str, id: str, tmp_path: Path) -> None:
    found = named(module, id, tmp_path)
    assert found[:1]
    assert found[0] in REGISTRY[id].labels


@pytest.mark.parametrize(("module", "id"), pairs(HEALTHY))
def test_a_healthy_program_is_not_accused(module: str, id: str, tmp_path: Path) -> None:
    assert named(module, id, tmp_path) == []


def test_a_repaired_program_is_not_accused(tmp_path: Path) -> None:
    assert named("plain", "plain_zero_grad_between_micro_batches", tmp_path, fixed=True) == []
