"""The same batches, or the same rows, are repeated again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, is_language_model, seen
from sonde.diagnose.measures.loss import held_out, learned
from sonde.diagnose.measures.model import projections, structure
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
COPIES: Final = 0.8
"""Fraction of the rows of a batch that have a copy in it, if there is no validation loss to show the harm ..."""
HALF: Final = 0.5
"""... and the least in any batch. Healthy generated runs have none."""
MIN_ROWS: Final = 8
MIN_FEATURES: Final = 4
"""Fewer features may take few values."""
LEARNED: Final = 0.3
"""Final loss as a fraction of its start, or of a constant prediction's."""
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
    elif len(copies) >= MIN_SEEN and copies.typical > COPIES and copies.lowest > HALF and _are_copies(window):
        yield _rows_alone(int(copies.steps[0]), copies.typical)


def _are_copies(window: Window) -> bool:
    """Whether rows that are equal cannot be so by nature, and nothing shows that this does no harm: sequences, or rows
    of several numbers that are not whole, and no validation loss."""
    state, size = learned(window), seen(window, "data/input/size").typical
    if state is None or held_out(window) is not None or not state.left < LEARNED or not size >= MIN_ROWS:
        return False
    if not len(seen(window, "data/loss/baseline")) or not seen(window, "data/input/sample_std").typical > 0:
        return False
    known = structure(window)
    if seen(window, "data/input/is_token").typical == 1.0:
        return any(module.kind in ("attention", "rnn") for module in known.modules) or bool(projections(window))
    largest = seen(window, "data/input/abs_max").typical
    return largest % 1 != 0 and bool(known.matrices) and known.matrices[0].fan_in >= MIN_FEATURES


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


def _rows_alone(step: int, share: float) -> Found:
    return Found(
        f"{percent(share)} of the rows in a batch are copies of another row in it: the data set has only a few "
        "different samples, and the model learns them by heart.",
        step=step,
        confidence=0.7,
        remedy="Check how the samples are picked: an index that is reused, or a slice that is too short. Then remove "
        "duplicates: `torch.unique(x, dim=0)` or `dataset.unique()`.",
        evidence=(Evidence("data/input/duplicates", share, "0", meaning="fraction of duplicate rows"),),
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
