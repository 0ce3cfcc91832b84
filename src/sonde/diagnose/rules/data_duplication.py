"""The same batches, or the same rows, are repeated again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_language_model, seen
from sonde.diagnose.measures.loss import held_out
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent
from sonde.schema.sketch import Array
from sonde.schema.window import Window

MIN_STEPS: Final = 40
NEAR: Final = 8
"""A batch that recurs within this number of steps does not belong to a new epoch."""
FEW: Final = 32
OFTEN: Final = 6
"""Average number of times that each batch was seen."""
PART: Final = 0.5
"""Fraction of the data set that is used at all; an epoch uses nearly all of it."""
GAP: Final = 3.0
WIDE_GAP: Final = 10.0
"""Validation loss divided by training loss."""
TURN: Final = 1.15
REMEDY: Final = (
    "Give each worker its own shard and seed (`worker_init_fn`, `DistributedSampler`), and remove duplicates: "
    "`torch.unique(x, dim=0)` or `dataset.unique()`."
)


@rule(
    causes=("label_shuffling", "loss_oscillation", "overfitting"),
    references=("Hernandez et al. 2022, Scaling laws and interpretability of learning from repeated data",),
)
def data_duplication(window: Window) -> Iterator[Found]:
    """Training sees the same data far more often than it should."""
    steps, hashes = window.get("data/batch/hash")
    if len(hashes) >= MIN_STEPS:
        again = _share_seen_lately(hashes)
        num = len(np.unique(hashes))
        if again > 0.4 and num > 2 * NEAR:
            yield _repeated(int(steps[0]), again, num, len(hashes))
            return
        if num <= FEW and len(hashes) >= OFTEN * num and _is_harmful(window, num):
            yield _few(int(steps[0]), num, len(hashes))
            return
    if len(hashes) >= MIN_STEPS and (found := _part_of_source(window, int(steps[0]), hashes)) is not None:
        yield found
        return
    copies = seen(window, "data/input/duplicates")
    if len(copies) >= MIN_SEEN and copies.typical > 0.3 and _is_learned_by_heart(window):
        yield _rows(int(copies.steps[0]), copies.typical)


def _part_of_source(window: Window, step: int, hashes: Array) -> Found | None:
    """Only a small part of the data set is ever trained on, again and again: `next(iter(loader))` in each step."""
    sizes, batch = seen(window, "data/batch/source_size"), seen(window, "data/input/size").typical
    num = len(np.unique(hashes))
    if not len(sizes) or not sizes.typical > 0 or len(hashes) < OFTEN * num:
        return None
    source, used = sizes.typical, num * batch
    if not used < PART * source or not len(hashes) * batch > source:
        return None
    which = "the same batch" if num == 1 else f"the same {num} batches"
    return Found(
        f"Every step trains on {which}, {int(used):,} of the {int(source):,} samples of the data set.",
        step=step,
        confidence=0.9,
        remedy="Create the iterator once: `for batch in loader:`. `next(iter(loader))` starts over.",
        evidence=(
            Evidence("data/batch/source_size", used / source, "1", None, "fraction of the data set that is used"),
            Evidence("data/batch/hash", num / len(hashes), "1 when shuffled", meaning="fraction of distinct batches"),
        ),
    )


def _share_seen_lately(hashes: Array) -> float:
    """Fraction of batches that already occurred within the last few steps; nearly all of them in a short cycle."""
    lately = [hashes[i] in hashes[max(0, i - NEAR) : i] for i in range(1, len(hashes))]
    return float(np.mean(lately))


def _is_harmful(window: Window, num: int) -> bool:
    """Whether repeating a few batches does harm. They may be all the data there is; then only validation counts.

    A language model never has that little data.
    """
    return (num > 1 and is_language_model(window)) or _has_gap(window)


def _has_gap(window: Window) -> bool:
    """Whether validation gets worse, or is far worse than training and not good either."""
    state = held_out(window)
    if state is None:
        return False
    return (state.gap > GAP and state.turn > TURN) or (state.gap > WIDE_GAP and state.end > 0.2 * state.guessing)


def _is_learned_by_heart(window: Window) -> bool:
    """Whether the model has memorised its data. Rows with few possible values repeat by nature; there, validation is
    as good as training."""
    state = held_out(window)
    return state is not None and state.gap > GAP


def _repeated(step: int, again: float, num: int, total: int) -> Found:
    return Found(
        f"{percent(again)} of the batches had already occurred within the last {NEAR} steps: "
        f"there are only {num:,} different batches in {total:,} steps.",
        step=step,
        confidence=0.9,
        remedy=REMEDY,
        evidence=(Evidence("data/batch/hash", num / total, "1 when shuffled", meaning="fraction of distinct batches"),),
    )


def _few(step: int, num: int, total: int) -> Found:
    return Found(
        f"Every step trains on the same batch (repeated {total:,} times)."
        if num == 1
        else f"The same {num} batches are repeated about {total // num:,} times each.",
        step=step,
        confidence=0.85,
        remedy=REMEDY,
        evidence=(Evidence("data/batch/hash", num / total, "1 when shuffled", meaning="fraction of distinct batches"),),
    )


def _rows(step: int, share: float) -> Found:
    return Found(
        f"{percent(share)} of the rows in a batch are duplicates, and the validation loss is far above the training "
        "loss.",
        step=step,
        confidence=0.75,
        remedy=REMEDY,
        evidence=(Evidence("data/input/duplicates", share, "0", meaning="fraction of duplicate rows"),),
    )
