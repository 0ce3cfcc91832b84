"""Decides which scalars are losses, by their names alone. Used by rules, views, reports and commands."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Final

from sonde.schema.names import is_inspection

SEEN_TRAINING: Final = "data/loss/train"
"""The training loss that sonde recorded itself, for scripts that log none."""
SEEN_VALIDATION: Final = "data/loss/validation"
"""The loss of evaluated batches, recorded in the same way."""
SEEN_CALL: Final = "data/loss/value"
"""The result of the first loss function called in a step, at inspected steps. Older runs have nothing else."""
SEEN: Final = (SEEN_TRAINING, SEEN_VALIDATION, SEEN_CALL)

_TRAINING: Final = frozenset({"train", "training", "trn"})
_HELD_OUT: Final = (
    "val", "valid", "validation", "eval", "evaluation", "dev", "heldout", "holdout", "held", "test", "testing",
)  # fmt: skip
_RETAINED: Final = frozenset({"retained", "retention", "forgetting", "pretrained", "pretraining"})
"""In the name of a loss: measured on data that a model knew before it was fine-tuned. Not a validation loss."""

# Words that may appear next to "loss" in the name of the training loss, from most to least preferred.
_PLAIN: Final = frozenset({"metrics", "metric", "scalars", "log", "logs", "samples", "model", "main"})
_PER_STEP: Final = frozenset({"step", "batch", "iter", "iteration", "inner"})
_TOTAL: Final = frozenset({"total", "overall", "full", "combined", "objective", "final", "sum", "all"})
_AVERAGED: Final = frozenset(
    {"avg", "average", "mean", "running", "smooth", "smoothed", "ema", "epoch", "global", "per", "token"}
)
_KINDS: Final = frozenset({
    "ce", "xent", "crossentropy", "cross", "entropy", "nll", "lm", "clm", "mlm",
    "mse", "mae", "l1", "l2", "bce", "huber",
})  # fmt: skip
_TIERS: Final = (_PLAIN, _PER_STEP, _TOTAL, _AVERAGED, _KINDS)
_KIND: Final = len(_TIERS) - 1
_NOT_A_LOSS: Final = frozenset(
    {"scale", "scaler", "weight", "weights", "coef", "coeff", "coefficient", "lambda", "lr", "rate", "grad", "gradient"}
    | {"norm", "ratio", "delta", "diff", "change", "std", "var", "variance", "min", "max", "best", "lowest", "highest"}
    | {"num", "count", "time", "scaling", "spike", "spikes", "nan", "rank", "slope"}
)
_SETS: Final = frozenset({"out", "dataloader", "idx", "loader", "set", "dataset"})
_ACCURACIES: Final = frozenset({"acc", "accuracy", "top1"})
_NEUTRAL: Final = frozenset({"loss", *_HELD_OUT}).union(
    _TRAINING, _PLAIN, _PER_STEP, _TOTAL, _AVERAGED, _SETS, _ACCURACIES
)
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+")


def training_loss(names: Collection[str]) -> str | None:
    """The training loss among all scalars of a run; None if no name matches.

    A loss logged by the user takes precedence over one recorded by sonde; a single loss with an unknown qualifier comes
    last.

    >>> training_loss(["objective/loss", "val/loss", "loss", "data/loss/train"])
    'loss'
    >>> training_loss(["Loss/Train", "lr"]), training_loss(["d_loss", "g_loss"]), training_loss(["my_loss"])
    ('Loss/Train', None, 'my_loss')
    """
    means = {"train_loss"} if "train_runtime" in names else set()  # transformers' mean over the whole run
    losses = [name for name in names if _is_loss(name) and not _is_held_out(name) and name not in means]
    known = [name for name in losses if _tier(name) < _KIND]
    # Several with qualifiers are parts of a loss, or losses of several models: none of them is the loss.
    only = losses if len(losses) == 1 else []
    kinds = [name for name in only if _tier(name) == _KIND]
    seen = [name for name in (SEEN_TRAINING, SEEN_CALL) if name in names]
    return min(known or kinds or seen[:1] or only, key=_training_rank, default=None)


def validation_loss(names: Collection[str]) -> str | None:
    """The validation loss among all scalars of a run; None if there is none.

    >>> validation_loss(["loss", "test_loss", "val_loss_step", "val_loss_epoch"])
    'val_loss_epoch'
    """
    training = training_loss(names)
    own = frozenset() if training is None or training in SEEN else _qualifiers(training)
    losses = [name for name in names if _is_loss(name)]
    parts = {_qualifiers(name) for name in losses if not _is_held_out(name)} - {own, frozenset()}
    # The parts of a loss are not the loss: "val/box_loss" next to "train/box_loss" and "train/total_loss".
    whole = [name for name in losses if _is_held_out(name) and _qualifiers(name) not in parts]
    seen = SEEN_VALIDATION if SEEN_VALIDATION in names else None
    return min(whole, key=lambda name: _held_out_rank(name, own), default=seen)


def validation_accuracy(names: Iterable[str]) -> str | None:
    """The accuracy on held-out data.

    >>> validation_accuracy(["train/acc", "val/top5_acc", "val/acc"])
    'val/acc'
    """
    found = [name for name in names if _is_held_out(name) and _is_accuracy(name)]
    return min(found, key=lambda name: _held_out_rank(name, frozenset()), default=None)


def retained_losses(names: Iterable[str]) -> list[str]:
    """Losses on data that the model knew before this training.

    >>> retained_losses(["eval_loss", "eval_retained_loss"])
    ['eval_retained_loss']
    """
    return sorted(name for name in names if "loss" in words(name) and _RETAINED & set(words(name)))


def shown_scalars(names: Collection[str]) -> list[str]:
    """The scalars that views list: those the user logged, and losses recorded by sonde if the user logged none.

    >>> shown_scalars(["lr", "data/loss/train", "data/input/std"])
    ['lr', 'data/loss/train']
    """
    losses = {training_loss(names), validation_loss(names)}
    return [name for name in names if name in losses or not is_inspection(name)]


def logged_scalars(names: Collection[str]) -> list[str]:
    """The scalars that the user logged; for a loss that was not logged, the one that sonde recorded.

    >>> logged_scalars(["val_loss", "data/loss/train", "optim/lr", "data/input/std"])
    ['val_loss', 'data/loss/train']
    """
    return [name for name in shown_scalars(names) if not name.startswith("optim/")]


def is_loss(name: str) -> bool:
    """Whether a name is that of a loss of any kind, trained on or held out, whole or a part."""
    return name in SEEN or _is_loss(name) or bool(retained_losses([name]))


@lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """A name's words, in lower case: separated by anything that is not a letter or a digit, or by capitals.

    >>> words("Train/box-Loss_2"), words("trainLoss")
    (('train', 'box', 'loss', '2'), ('train', 'loss'))
    """
    return tuple("loss" if word == "losses" else word for word in map(str.lower, _WORD.findall(name)))


@lru_cache(maxsize=4096)
def _is_loss(name: str) -> bool:
    found = set(words(name))
    return "loss" in found and not found & (_RETAINED | _NOT_A_LOSS) and not is_inspection(name)


def _is_accuracy(name: str) -> bool:
    found = set(words(name))
    return bool(found & _ACCURACIES) and not found & (_RETAINED | _NOT_A_LOSS) and not is_inspection(name)


def _is_held_out(name: str) -> bool:
    return not set(words(name)).isdisjoint(_HELD_OUT)


@lru_cache(maxsize=4096)
def _qualifiers(name: str) -> frozenset[str]:
    """The words that say which part of a loss it is, or which data set it was measured on."""
    return frozenset(word for word in words(name) if word not in _NEUTRAL and not word.isdigit())


@lru_cache(maxsize=4096)
def _tier(name: str) -> int:
    """The number of the last tier that its words need; one more than the number of tiers if they are in none."""
    rest = set(words(name)) - _TRAINING - {"loss"}
    needs = [next((n for n, tier in enumerate(_TIERS) if word in tier), len(_TIERS)) for word in rest]
    return max(needs, default=0)


def _training_rank(name: str) -> tuple[int, int, int, str]:
    return _tier(name), len(words(name)), len(name), name


def _held_out_rank(name: str, own: frozenset[str]) -> tuple[bool, bool, int, int, int, str]:
    """Prefer the qualifiers of the training loss, then means over single batches, then the usual validation set."""
    found = words(name)
    is_other = _qualifiers(name) not in (own, frozenset())
    which = min(_HELD_OUT.index(word) for word in found if word in _HELD_OUT)
    return is_other, bool(_PER_STEP & set(found)), which, len(found), len(name), name
