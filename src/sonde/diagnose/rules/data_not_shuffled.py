"""Batches arrive sorted by class or by target value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_language_model, is_regression, seen
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, percent
from sonde.schema.window import Window

MIN_BATCH: Final = 8
MIN_STEPS: Final = 20
REMEDY: Final = "Shuffle the data: `DataLoader(dataset, batch_size=..., shuffle=True)`."


@rule(
    causes=(
        "loss_oscillation", "loss_spikes", "bad_batches", "overfitting", "label_shuffling", "underfitting",
        "data_duplication", "class_imbalance", "lr_too_high", "exploding_gradients", "missing_zero_grad",
    ),
    references=("Bengio 2012, Practical recommendations: shuffling",),
)  # fmt: skip
def data_not_shuffled(window: Window) -> Iterator[Found]:
    """Each batch contains one class, or one range of targets, although the data contain all of them."""
    size = seen(window, "data/input/size").typical
    if not size >= MIN_BATCH or is_language_model(window):
        return
    yield from _classes(window, size)
    yield from _numbers(window, size)


def _classes(window: Window, size: float) -> Iterator[Found]:
    purity, entropy = seen(window, "data/batch/label_purity"), seen(window, "data/loss/baseline")
    if len(purity) < MIN_STEPS or not len(entropy) or is_regression(window):
        return
    # The number of equally frequent classes with the same entropy.
    num_classes = float(np.exp(entropy.values[-1]))
    share = 1 / num_classes
    expected = share + 3 * float(np.sqrt(share * (1 - share) / size))
    if not 1.7 <= num_classes < np.inf or not min(expected + 0.2, 0.99) < purity.typical <= 1:
        return
    yield Found(
        f"In a typical batch, {percent(purity.typical)} of the samples belong to one class, although there are about "
        f"{num_classes:.0f} equally frequent classes: the data are not shuffled.",
        step=int(purity.steps[0]),
        confidence=0.9,
        remedy=REMEDY,
        evidence=(
            Evidence(
                "data/batch/label_purity",
                purity.typical,
                f"about {number(share)}, at most {number(expected)}",
                meaning="fraction of a batch in one class",
            ),
        ),
    )


def _numbers(window: Window, size: float) -> Iterator[Found]:
    mean, std = seen(window, "data/target/mean"), seen(window, "data/target/std")
    if len(mean) < MIN_STEPS or not is_regression(window) or len(mean) != len(std):
        return
    within = float(np.median(std.values))
    low, high = np.quantile(mean.values, (0.1, 0.9))  # a single odd batch is not a missing shuffle
    between = float(high - low) / 2.56  # standard deviations between the tenths of a normal distribution
    # Means of shuffled batches differ by the standard deviation divided by the root of the batch size.
    if len(mean) < MIN_SEEN or not within > 0 or not between > max(1.0, 5 / float(np.sqrt(size))) * within:
        return
    yield Found(
        f"The mean target varies by {number(between, 3)} between batches, but targets vary only by "
        f"{number(within, 3)} within a batch: the data are not shuffled.",
        step=int(mean.steps[0]),
        confidence=0.8,
        remedy=REMEDY,
        evidence=(
            Evidence(
                "data/target/mean",
                between / within,
                f"about {number(size**-0.5)}",
                meaning="standard deviation between batches / within batches",
            ),
        ),
    )
