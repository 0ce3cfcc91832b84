"""Batches of one class after the other, or of one range of targets after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_language_model, is_regression, seen
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MIN_BATCH: Final = 8
MIN_STEPS: Final = 20
REMEDY: Final = "DataLoader(dataset, batch_size=..., shuffle=True)"


@rule(
    causes=(
        "loss_oscillation", "loss_spikes", "bad_batches", "overfitting", "label_shuffling", "underfitting",
        "data_duplication", "class_imbalance", "lr_too_high", "exploding_gradients", "missing_zero_grad",
    ),
    references=("Bengio 2012, Practical recommendations: shuffling",),
)  # fmt: skip
def data_not_shuffled(window: Window) -> Iterator[Found]:
    """Each batch holds one class, or one range of targets, although all of them occur in the data."""
    size = seen(window, "data/input/size").typical
    if not size >= MIN_BATCH or is_language_model(window):
        return
    yield from _classes(window, size)
    yield from _numbers(window, size)


def _classes(window: Window, size: float) -> Iterator[Found]:
    purity, entropy = seen(window, "data/batch/label_purity"), seen(window, "data/loss/baseline")
    if len(purity) < MIN_STEPS or not len(entropy) or is_regression(window):
        return
    # As many equally frequent classes would have the entropy of these.
    num_classes = float(np.exp(entropy.values[-1]))
    share = 1 / num_classes
    expected = share + 3 * float(np.sqrt(share * (1 - share) / size))
    if num_classes < 1.7 or not purity.typical > min(expected + 0.2, 0.99):
        return
    yield Found(
        f"a batch is {purity.typical:.0%} of one class, although there are {num_classes:.0f} about equally "
        "frequent ones: the data come in order",
        step=int(purity.steps[0]),
        confidence=0.9,
        remedy=REMEDY,
        evidence=(Evidence("data/batch/label_purity", purity.typical, f"about {share:.2g}, at most {expected:.2g}"),),
    )


def _numbers(window: Window, size: float) -> Iterator[Found]:
    mean, std = seen(window, "data/target/mean"), seen(window, "data/target/std")
    if len(mean) < MIN_STEPS or not is_regression(window) or len(mean) != len(std):
        return
    within = float(np.median(std.values))
    between = float(np.std(mean.values))
    # Of shuffled batches the means differ by the deviation over the root of their size.
    if len(mean) < MIN_SEEN or not within > 0 or not between > max(1.0, 5 / float(np.sqrt(size))) * within:
        return
    yield Found(
        f"the mean target differs between batches by {between:.3g}, within them targets only by {within:.3g}: "
        "the data come in order",
        step=int(mean.steps[0]),
        confidence=0.8,
        remedy=REMEDY,
        evidence=(
            Evidence("data/target/mean", between / within, f"about {size**-0.5:.2g}", meaning="between over within"),
        ),
    )
