"""One class is so common that the model does well by predicting no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_classification, is_language_model, seen
from sonde.diagnose.measures.loss import held_out
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.sketch import Array
from sonde.schema.window import Window

UNEVEN: Final = 0.45
"""Entropy of the classes, relative to equally frequent ones: two classes at ten to one have 0.44."""


@rule(
    causes=("underfitting", "constant_output", "overfitting", "label_shuffling", "lr_too_low"),
    references=("SageMaker Debugger: ClassImbalance", "He and Garcia 2009, Learning from imbalanced data"),
)
def class_imbalance(window: Window) -> Iterator[Found]:
    """Rare classes are hardly ever predicted, because missing them costs almost nothing."""
    entropy, share = seen(window, "data/loss/baseline"), seen(window, "data/target/top_share")
    if len(share) < MIN_SEEN or not len(entropy) or not is_classification(window) or is_language_model(window):
        return
    num_classes = max(seen(window, "data/target/num_classes").highest, 2)
    evenness = float(entropy.values[-1]) / np.log(num_classes)
    # A single class is not an imbalance: all targets of a discriminator's batch may be "real".
    if not 0 < evenness < UNEVEN or not _is_rare_missed(window, share.mean):
        return
    yield Found(
        f"{percent(share.mean)} of the targets belong to one class, and the model misses the other classes.",
        step=int(share.steps[0]),
        confidence=0.8,
        remedy="Weight the loss: `nn.CrossEntropyLoss(weight=1 / class_counts)`, or use a `WeightedRandomSampler`. "
        "Judge the model by its recall per class.",
        evidence=(
            Evidence(
                "data/target/top_share",
                share.mean,
                f"about {number(1 / num_classes)} if balanced",
                meaning="fraction of targets in the largest class",
            ),
            Evidence(
                "data/output/top_share",
                seen(window, "data/output/top_share").late,
                "as in the targets",
                meaning="fraction of predictions in one class",
            ),
        ),
    )


def _is_rare_missed(window: Window, share: float) -> bool:
    """Whether predictions are more one-sided than the targets, or validation is worse than the largest class alone."""
    held = held_out(window)
    if held is not None and np.isfinite(held.accuracy):
        return held.accuracy < share - 0.25 * (1 - share)
    # Means: most batches have none of a class of one sample in a hundred.
    said, right = (_late_mean(seen(window, f"data/output/{what}").values) for what in ("top_share", "accuracy"))
    return said >= share and right <= share + 0.3 * (1 - share)


def _late_mean(values: Array) -> float:
    return float(np.mean(values[len(values) // 2 :])) if len(values) else float("nan")
