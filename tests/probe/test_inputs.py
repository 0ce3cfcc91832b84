"""Which tensor is the input, and which the output, of models of all kinds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sonde.probe.loss.inputs import all_tensors, main_input, main_output

X, IDS, MASK, LABELS = torch.ones(2, 3), torch.ones(2, 5).long(), torch.ones(2, 5), torch.zeros(2).long()


def test_the_first_argument_is_the_input():
    assert main_input((X, MASK), {}) is X
    assert main_input((None, X), {}) is X


def test_keywords_are_searched_by_name():
    assert main_input((), {"attention_mask": MASK, "labels": LABELS, "input_ids": IDS}) is IDS
    assert main_input((), {"mask": MASK, "features": X}) is X


def test_structures_are_searched():
    assert main_input(({"labels": LABELS, "pixel_values": X},), {}) is X
    assert main_input(([X, X],), {}) is X
    assert main_input((3, "text"), {"labels": LABELS}) is None


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


def test_outputs_are_predictions_before_they_are_losses():
    assert main_output(Output(torch.tensor(1.0), X)) is X
    assert main_output((torch.tensor(1.0), X)) is X
    assert main_output({"loss": X[0, 0], "hidden": X}) is X
    scalar = torch.tensor(1.0)
    assert main_output(scalar) is scalar
    assert main_output("nothing") is None


def test_only_real_tensors_count_and_only_a_few():
    assert all_tensors(torch.ones(2, device="meta"), None, 3.0) == []
    assert len(all_tensors([X] * 100)) == 8
