"""One class is so common that the model does well by naming no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_classification, is_language_model, seen
from sonde.diagnose.measures.loss import held_out
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

UNEVEN: Final = 0.45
"""Entropy of the classes over that of equally frequent ones: two classes at ten to one have 0.44."""


@rule(
    causes=("underfitting", "constant_output", "overfitting", "label_shuffling", "lr_too_low"),
    references=("SageMaker Debugger: ClassImbalance", "He and Garcia 2009, Learning from imbalanced data"),
)
def class_imbalance(window: Window) -> Iterator[Found]:
    """The rare classes are hardly ever predicted, because hardly anything is lost by that."""
    entropy, share = seen(window, "data/loss/baseline"), seen(window, "data/target/top_share")
    if len(share) < MIN_SEEN or not len(entropy) or not is_classification(window) or is_language_model(window):
        return
    num_classes = max(seen(window, "data/target/num_classes").highest, 2)
    evenness = float(entropy.values[-1]) / np.log(num_classes)
    # A single class is no imbalance: a discriminator is told "real" a whole batch long.
    if not 0 < evenness < UNEVEN or not _is_rare_missed(window, share.mean):
        return
    yield Found(
        f"{share.mean:.0%} of the targets are of one class, and the others are missed",
        step=int(share.steps[0]),
        confidence=0.8,
        remedy="nn.CrossEntropyLoss(weight=1 / class_counts), or a WeightedRandomSampler; judge by recall per class",
        evidence=(
            Evidence("data/target/top_share", share.mean, f"about {1 / num_classes:.2g} when even"),
            Evidence("data/output/top_share", seen(window, "data/output/top_share").late, "that of the targets"),
        ),
    )


def _is_rare_missed(window: Window, share: float) -> bool:
    """Predictions are more one-sided than the targets, or validation is worse than the commonest class would be."""
    held = held_out(window)
    if held is not None and np.isfinite(held.accuracy):
        return held.accuracy < share - 0.25 * (1 - share)
    said, right = seen(window, "data/output/top_share").late, seen(window, "data/output/accuracy").late
    return said >= share and right <= share + 0.3 * (1 - share)
