"""The output has shape (B, 1) and the target (B,): the loss compares every sample with every other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import REGRESSIONS, seen
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window


@rule(
    severity="critical",
    causes=(
        "underfitting", "constant_output", "lr_too_low", "vanishing_gradients", "rank_collapse", "label_shuffling",
        "dead_relu", "unnormalised_targets", "wrong_loss_activation_pair", "bottleneck_layer", "symmetric_init",
    ),
    references=("PyTorch: 'Using a target size that is different to the input size'",),
)  # fmt: skip
def loss_shape_broadcast(window: Window) -> Iterator[Found]:
    """Output and target have different shapes, so broadcasting compares each output with all targets."""
    if structure(window).loss not in (*REGRESSIONS, "kl_div", ""):
        return
    terms, targets = seen(window, "data/loss/numel"), seen(window, "data/loss/target_numel")
    num = min(len(terms), len(targets))
    if num < 3:
        return
    ratio = terms.values[:num] / np.maximum(targets.values[:num], 1)
    # Comparing all outputs with a single number is intended: it is the label of a discriminator.
    is_bad = (ratio > 1) & (targets.values[:num] > 1)
    if is_bad.mean() < 0.9:
        return
    step = int(terms.steps[:num][is_bad][0])
    name = structure(window).loss
    yield Found(
        f"The loss{f' ({name})' if name else ''} is computed over {int(terms.values[0]):,} pairs for "
        f"{int(targets.values[0]):,} targets: output and target have different shapes, so each output is compared "
        "with every target.",
        step=step,
        confidence=0.95,
        remedy="Make the shapes equal before the loss: `output.squeeze(-1)` or `target.unsqueeze(-1)`.",
        evidence=(
            Evidence(
                "data/loss/numel", float(terms.values[0]), f"{int(targets.values[0]):,}", step, "terms of the loss"
            ),
            Evidence("data/loss/target_numel", float(targets.values[0]), "", step, "number of targets"),
        ),
    )
