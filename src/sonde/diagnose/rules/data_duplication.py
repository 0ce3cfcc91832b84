"""The same batches, or the same rows, over and over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_language_model, seen
from sonde.diagnose.measures.loss import held_out
from sonde.diagnose.rule import Found, rule
from sonde.schema.sketch import Array
from sonde.schema.window import Window

MIN_STEPS: Final = 40
NEAR: Final = 8
"""A batch that was there this few steps ago is no new epoch."""
FEW: Final = 32
OFTEN: Final = 6
"""Times a batch was seen on average."""
GAP: Final = 3.0
WIDE_GAP: Final = 10.0
"""Validation over training loss."""
TURN: Final = 1.15
REMEDY: Final = (
    "give each worker its share and its seed (worker_init_fn, DistributedSampler), and drop copies: "
    "torch.unique(x, dim=0), dataset.unique()"
)


@rule(
    causes=("label_shuffling", "loss_oscillation"),
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
    copies = seen(window, "data/input/duplicates")
    if len(copies) >= MIN_SEEN and copies.typical > 0.3 and _is_learned_by_heart(window):
        yield _rows(int(copies.steps[0]), copies.typical)


def _share_seen_lately(hashes: Array) -> float:
    """Share of batches that were there among the few before; in a short cycle, that is nearly all of them."""
    lately = [hashes[i] in hashes[max(0, i - NEAR) : i] for i in range(1, len(hashes))]
    return float(np.mean(lately))


def _is_harmful(window: Window, num: int) -> bool:
    """A few batches in turn may be all the data there are; then only what validation says counts.

    A language model never has so few.
    """
    return (num > 1 and is_language_model(window)) or _has_gap(window)


def _has_gap(window: Window) -> bool:
    """Validation turns, or is left far behind while it is not good either."""
    state = held_out(window)
    if state is None:
        return False
    return (state.gap > GAP and state.turn > TURN) or (state.gap > WIDE_GAP and state.end > 0.2 * state.guessing)


def _is_learned_by_heart(window: Window) -> bool:
    """Rows of few possible values are rightly there twice, and then validation is as good as training."""
    state = held_out(window)
    return state is not None and state.gap > GAP


def _repeated(step: int, again: float, num: int, total: int) -> Found:
    return Found(
        f"{again:.0%} of the batches were already there within the last {NEAR} steps: "
        f"only {num} different batches in {total} steps",
        step=step,
        confidence=0.9,
        remedy=REMEDY,
        evidence=(Evidence("data/batch/hash", num / total, "1 when shuffled", meaning="share of different batches"),),
    )


def _few(step: int, num: int, total: int) -> Found:
    return Found(
        f"the same {num} batches are repeated about {total // num} times each",
        step=step,
        confidence=0.85,
        remedy=REMEDY,
        evidence=(Evidence("data/batch/hash", num / total, "1 when shuffled", meaning="share of different batches"),),
    )


def _rows(step: int, share: float) -> Found:
    return Found(
        f"{share:.0%} of the rows of a batch are there twice, and validation is far behind training",
        step=step,
        confidence=0.75,
        remedy=REMEDY,
        evidence=(Evidence("data/input/duplicates", share, "0"),),
    )
