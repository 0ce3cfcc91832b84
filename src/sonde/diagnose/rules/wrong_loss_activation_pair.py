"""The last activation and the loss do not match: softmax applied twice, targets out of range, classes as numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import MIN_SEEN, REGRESSIONS, last_module, seen
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

BOUNDED: Final = {"Sigmoid": (0.0, 1.0), "Hardsigmoid": (0.0, 1.0), "Tanh": (-1.0, 1.0), "Hardtanh": (-1.0, 1.0)}
ALMOST: Final = 0.99
PRESSING: Final = 0.95
"""How close outputs must come to a bound before it is assumed without seeing the module that sets it."""
MANY_SEEN: Final = 20
"""Number of inspections after which a range that is filled from end to end, and never left, counts as a bound, too."""
SQUASHED: Final = 0.02
"""Relative difference between the largest output of the last layer and what a sigmoid made of it."""
CLOSE: Final = 0.05
"""Distance from 0 to which outputs come again and again without crossing it; a sigmoid does that for low targets ..."""
SPREAD: Final = 0.3
"""... while other outputs of the same batch differ by this fraction of the targets' standard deviation."""
REACH: Final = 0.5
"""Targets are out of range if they exceed the range of the outputs by half their standard deviation."""

TWICE: Final = (0.8, 1.01)
"""Range of the sum of log p - min(log p) over the classes of a softmax of confident probabilities: at most 1."""


@dataclass(frozen=True, slots=True)
class Ends:
    """The statistics of outputs and targets that this rule uses."""

    loss: str
    last: str
    low: float
    high: float
    width: float
    rows: float
    """Fraction of rows that are probability distributions, in the inspection with the fewest."""
    columns: float
    logs: float
    target_low: float
    target_high: float
    target_std: float
    target_mean: float
    num_classes: float
    is_class: bool
    step: int


@dataclass(frozen=True, slots=True)
class Verdict:
    message: str
    remedy: str
    evidence: tuple[Evidence, ...]
    confidence: float
    severity: str | None = None


@rule(
    severity="critical",
    causes=(
        "underfitting", "vanishing_gradients", "saturated_activations", "constant_output", "lr_too_low", "dead_relu",
        "unnormalised_targets", "frozen_layers", "detached_graph", "symmetric_init", "label_shuffling", "rank_collapse",
        "output_logit_growth", "bottleneck_layer", "class_imbalance", "adam_epsilon_dominates", "init_scale",
    ),
    references=(
        "Schoop et al. 2021, UMLAUT",
        "Wardat et al. 2021, DeepLocalize",
        "Ben Braiek and Khomh 2022, TheDeepChecker",
    ),
)  # fmt: skip
def wrong_loss_activation_pair(window: Window) -> Iterator[Found]:
    """The model's outputs are not what its loss expects."""
    ends = _ends(window)
    if ends is None:
        return
    for judge in (
        _softmax,
        _softmax_of_probabilities,
        _not_logits,
        _bounded_logits,
        _out_of_reach,
        _odd_targets,
        _classes_as_numbers,
        _one_hot,
    ):
        verdict = judge(window, ends)
        if verdict is not None:
            yield Found(
                verdict.message,
                step=ends.step,
                confidence=verdict.confidence,
                remedy=verdict.remedy,
                evidence=verdict.evidence,
                severity=verdict.severity,
            )
            return


def _ends(window: Window) -> Ends | None:
    low, high = seen(window, "data/output/min"), seen(window, "data/output/max")
    # Count non-finite outputs too: a run that diverges at once has few others.
    if len(window.get("data/output/min")[1]) < MIN_SEEN or not len(low):
        return None
    return Ends(
        loss=structure(window).loss,
        last=last_module(window),
        low=low.lowest,
        high=high.highest,
        width=seen(window, "data/output/width").typical,
        rows=seen(window, "data/output/is_distribution").lowest,
        columns=seen(window, "data/output/column_distribution").typical,
        logs=seen(window, "data/output/is_log_distribution").typical,
        target_low=seen(window, "data/target/min").lowest,
        target_high=seen(window, "data/target/max").highest,
        target_std=seen(window, "data/target/std").typical,
        target_mean=seen(window, "data/target/mean").typical,
        num_classes=seen(window, "data/target/num_classes").highest,
        is_class=seen(window, "data/target/is_class").typical == 1.0,
        step=int(low.steps[0]),
    )


def _softmax(window: Window, ends: Ends) -> Verdict | None:
    """A softmax over one unit, over the batch, before a loss that applies its own, or with several labels at once."""
    if ends.width == 1 and ends.rows >= ALMOST:
        return Verdict(
            "The output is a softmax over a single unit: it is 1 for every input, and no gradient passes through it.",
            "Remove the softmax and use `nn.BCEWithLogitsLoss()`, or replace it with `nn.Sigmoid()`.",
            (
                Evidence("data/output/min", ends.low, "below 1", meaning="smallest output"),
                Evidence("data/output/width", 1, "2 or more", meaning="number of outputs"),
            ),
            0.95,
        )
    if ends.width == 1 and ends.loss == "cross_entropy":
        return Verdict(
            "Cross entropy over a single output is always 0: there is no other class to compare with.",
            "Use `nn.BCEWithLogitsLoss()`, or one output per class.",
            (Evidence("data/output/width", 1, "2 or more", meaning="number of outputs"),),
            0.95,
        )
    if (ends.columns >= ALMOST or _is_last_over_batch(window)) and not ends.rows >= ALMOST and _has_batches(window):
        return Verdict(
            "The softmax is taken over the batch: each column of the output sums to 1, so samples compete with each "
            "other.",
            "Use `nn.Softmax(dim=-1)`, or no softmax at all before `nn.CrossEntropyLoss()`.",
            (Evidence("data/output/is_distribution", ends.rows, "1", meaning="fraction of rows that sum to 1"),),
            0.95,
        )
    if not ends.rows >= ALMOST or not ends.width > 1:
        return None
    if ends.loss in ("cross_entropy", "binary_cross_entropy_with_logits"):
        return Verdict(
            f"Softmax is applied twice: {ends.loss} gets probabilities instead of logits, so the loss cannot get close "
            "to 0.",
            "Pass the values before the softmax to the loss.",
            (
                Evidence("data/output/is_distribution", ends.rows, "0", meaning="fraction of rows that sum to 1"),
                Evidence("data/output/max", ends.high, "above 1", meaning="largest output"),
            ),
            0.95,
        )
    if ends.loss == "nll_loss":
        return Verdict(
            "The loss (nll_loss) gets probabilities, but expects their logarithms.",
            "Use `nn.LogSoftmax(dim=-1)` instead of `nn.Softmax()`, or `nn.CrossEntropyLoss()` on the logits.",
            (
                Evidence("data/output/is_distribution", ends.rows, "0", meaning="fraction of rows that sum to 1"),
                Evidence("data/output/max", ends.high, "below 0", meaning="largest output"),
            ),
            0.95,
        )
    if ends.loss == "binary_cross_entropy" and ends.is_class and not 0.8 < ends.target_mean * ends.width < 1.25:
        return Verdict(
            "The softmax makes the outputs sum to 1, but several labels of a sample can be true at once.",
            "Use `nn.BCEWithLogitsLoss()` on the values before the softmax.",
            (
                Evidence(
                    "data/target/mean",
                    ends.target_mean,
                    f"{number(1 / ends.width)} for one label per sample",
                    meaning="mean target",
                ),
            ),
            0.85,
        )
    return None


def _softmax_of_probabilities(window: Window, ends: Ends) -> Verdict | None:
    """Distillation in which one side is a softmax of a softmax: its classes are at most a factor of e apart."""
    if ends.loss != "kl_div":
        return None
    for side, who in (("target", "teacher"), ("output", "student")):
        name = f"data/{side}/log_spread"
        spread = seen(window, name)
        if len(spread) >= MIN_SEEN and TWICE[0] < spread.late and spread.highest < TWICE[1]:
            return Verdict(
                f"The {who}'s distribution is a softmax of probabilities: softmax is applied twice, and its classes "
                "are nearly equally likely.",
                f"Pass the {who}'s logits to the softmax of the loss: `F.kl_div(student.log_softmax(-1), "
                'teacher.softmax(-1), reduction="batchmean")`.',
                (Evidence(name, spread.late, "well above 1", None, "sum of log p - min(log p), largest"),),
                0.9,
            )
    return None


def _is_last_over_batch(window: Window) -> bool:
    """Whether the last module is a softmax over dimension 0; the loss may get its logarithm."""
    leaves = [m for m in structure(window).in_order if m.is_leaf and m.kind not in ("loss", "dropout")]
    return bool(leaves) and leaves[-1].kind == "softmax" and leaves[-1].detail.get("dim") == 0


def _has_batches(window: Window) -> bool:
    """Whether batches have more than one sample; a batch of one is a single row and column."""
    size = seen(window, "data/input/size")
    return not len(size) or size.typical > 1


def _not_logits(window: Window, ends: Ends) -> Verdict | None:
    """Logits passed to a loss that expects probabilities, or the other way around."""
    if ends.loss == "binary_cross_entropy_with_logits" and _bound(window, ends) == (0.0, 1.0):
        return Verdict(
            "Sigmoid is applied twice: the outputs are between 0 and 1 at every step, and the loss applies its own "
            "sigmoid.",
            "Pass the values before the sigmoid to `nn.BCEWithLogitsLoss()`, or use `nn.BCELoss()`.",
            (
                Evidence("data/output/min", ends.low, "negative", meaning="smallest output"),
                Evidence("data/output/max", ends.high, "above 1", meaning="largest output"),
            ),
            0.95 if ends.last == "Sigmoid" else 0.9,
        )
    value = seen(window, "data/loss/value")
    if ends.loss == "nll_loss" and ends.logs < 0.5 and value.lowest < 0:
        return Verdict(
            "The loss (nll_loss) gets plain logits: it is negative and falls without bound as the logits grow.",
            "Use `nn.CrossEntropyLoss()` instead of `nn.NLLLoss()`, or `nn.LogSoftmax(dim=-1)` as the last layer.",
            (
                Evidence("data/loss/value", value.lowest, "0 or more", meaning="lowest loss"),
                Evidence("data/output/max", ends.high, "0 or less", meaning="largest output"),
            ),
            0.95,
        )
    return None


def _bounded_logits(window: Window, ends: Ends) -> Verdict | None:
    """Logits bounded by a sigmoid or tanh, or cut off at 0."""
    if ends.loss != "cross_entropy" or ends.rows >= ALMOST:
        return None
    bound = _bound(window, ends)
    if bound is not None:
        return Verdict(
            f"The logits are confined to {bound[0]:g} to {bound[1]:g}, so their cross entropy cannot get close to 0.",
            "Remove the activation after the last layer.",
            (
                Evidence("data/output/min", ends.low, "below -1", meaning="smallest output"),
                Evidence("data/output/max", ends.high, "above 1", meaning="largest output"),
            ),
            0.9,
        )
    lows = seen(window, "data/output/min").values
    if (lows == 0).mean() >= ALMOST:
        return Verdict(
            "The logits are cut off at 0 by a ReLU after the last layer: classes with a logit of 0 learn nothing.",
            "Remove the ReLU after the last layer.",
            (Evidence("data/output/min", ends.low, "negative", meaning="smallest output"),),
            0.9,
        )
    return None


def _bound(window: Window, ends: Ends) -> tuple[float, float] | None:
    """The range that outputs cannot leave, known from the last module or from outputs close to the bound."""
    if ends.last in BOUNDED:
        low, high = BOUNDED[ends.last]
        return (low, high) if low <= ends.low and ends.high <= high else None
    if _is_squashed(window):
        return 0.0, 1.0
    highs = seen(window, "data/output/max")
    is_filled = (
        ends.loss not in REGRESSIONS  # numbers to be predicted may themselves be between 0 and 1
        and len(highs) >= MANY_SEEN
        and ends.high >= PRESSING
        and 0 <= ends.low <= 1 - PRESSING
    )
    is_pressing = (highs.typical >= PRESSING or is_filled) and ends.high <= 1
    if is_pressing and ends.low >= 0:
        return 0.0, 1.0
    return (-1.0, 1.0) if is_pressing and ends.low >= -1 else None


def _is_squashed(window: Window) -> bool:
    """Whether a sigmoid ran, as a function, after the last layer: it maps the layer's largest output to the output
    that is farthest from one half."""
    leaves = [m for m in structure(window).in_order if m.is_leaf and m.kind not in ("loss", "dropout")]
    if not leaves or leaves[-1].kind not in ("linear", "conv"):
        return False
    steps, largest = window.get(f"act/{leaves[-1].name}/max_abs")  # optional, and needed by other rules
    low, high = seen(window, "data/output/min"), seen(window, "data/output/max")
    own, mine, theirs = np.intersect1d(steps, low.steps, return_indices=True)
    if len(own) < MIN_SEEN or not np.array_equal(low.steps, high.steps):
        return False
    ends = np.stack([low.values[theirs], high.values[theirs]])
    if not ((ends > 0) & (ends < 1)).all():
        return False
    expected = np.abs(np.log(ends / (1 - ends))).max(axis=0)
    return bool((np.abs(largest[mine] - expected) < SQUASHED * expected).mean() > PRESSING)


def _out_of_reach(window: Window, ends: Ends) -> Verdict | None:
    """Regression targets outside the range of the last activation."""
    if ends.loss not in REGRESSIONS or not ends.target_std > 0:
        return None
    low, high = _bound(window, ends) or _floor(window, ends)
    below = (low - ends.target_low) / ends.target_std
    above = (ends.target_high - high) / ends.target_std
    if not max(below, above) > REACH:
        return None
    first, last = number(ends.target_low, 3), number(ends.target_high, 3)
    return Verdict(
        f"The outputs are confined to {_range(low, high)}, but the targets range from {first} to {last}.",
        f"Remove the activation after the last layer{f' ({ends.last})' if ends.last in (*BOUNDED, 'ReLU') else ''}"
        ", or scale the targets into its range.",
        (
            Evidence("data/output/min", ends.low, f"down to {first}", meaning="smallest output"),
            Evidence("data/output/max", ends.high, f"up to {last}", meaning="largest output"),
        ),
        0.95 if ends.last in (*BOUNDED, "ReLU", "ReLU6", "Softplus") else 0.85,
    )


def _floor(window: Window, ends: Ends) -> tuple[float, float]:
    """The range of a ReLU, which gives exact zeros and nothing below, or of a Softplus or sigmoid, which come close."""
    inf = float("inf")
    if ends.last in ("ReLU", "ReLU6", "Softplus") and ends.low >= 0:
        return 0.0, 6.0 if ends.last == "ReLU6" else inf
    lows, highs = seen(window, "data/output/min"), seen(window, "data/output/max")
    if ends.low == 0 and (lows.values == 0).mean() > 0.5:
        return 0.0, inf
    is_shy = ends.low > 0 and lows.late < CLOSE and ends.high <= 1 and len(lows) >= MANY_SEEN
    if is_shy and float((highs.values - lows.values).max()) > SPREAD * ends.target_std:
        return 0.0, inf
    return -inf, inf


def _range(low: float, high: float) -> str:
    return f"{low:g} to {high:g}" if high < float("inf") else "0 and above (as by a ReLU on the output)"


def _odd_targets(window: Window, ends: Ends) -> Verdict | None:
    """Binary cross entropy with targets that are not probabilities."""
    if not ends.loss.startswith("binary_cross_entropy"):
        return None
    if ends.target_low >= -1e-6 and ends.target_high <= 1 + 1e-6:
        return None
    if not (ends.target_low < 0 or ends.target_high > 1):
        return None
    return Verdict(
        f"Binary cross entropy gets targets from {number(ends.target_low, 3)} to {number(ends.target_high, 3)}, but "
        "expects 0 to 1; outside that range it has no minimum.",
        "Map the targets to 0 and 1, or use `nn.CrossEntropyLoss()` for more than two classes.",
        (
            Evidence("data/target/min", ends.target_low, "0", meaning="smallest target"),
            Evidence("data/target/max", ends.target_high, "1", meaning="largest target"),
        ),
        0.95,
    )


def _classes_as_numbers(window: Window, ends: Ends) -> Verdict | None:
    """A squared error between a single output and the number of a class."""
    if ends.loss not in REGRESSIONS or ends.width != 1 or not ends.num_classes >= 3:
        return None
    spread = ends.target_high - ends.target_low
    is_whole = ends.target_low % 1 == 0 and ends.target_high % 1 == 0 and ends.num_classes <= spread + 1
    if not is_whole:
        return None
    # The loss gets floats; only `sonde.batch` shows whether the batch contained integers.
    is_integer = len(seen(window, "data/batch/label_purity")) > 0 or ends.is_class
    is_full = ends.target_low == 0 and ends.num_classes == spread + 1
    is_even = seen(window, "data/target/top_share").typical < 2.5 / ends.num_classes
    if not is_full or not (is_integer or is_even):
        return None
    count = int(ends.num_classes)
    return Verdict(
        f"The loss ({ends.loss}) measures the distance to a class number (0 to {count - 1}), although class 1 is no "
        "closer to class 2 than to class 4.",
        f"Use {count} outputs and `nn.CrossEntropyLoss()`.",
        (Evidence("data/target/num_classes", ends.num_classes, "continuous targets", meaning="number of classes"),),
        0.8 if is_integer else 0.65,
    )


def _one_hot(window: Window, ends: Ends) -> Verdict | None:
    """A squared error on one-hot classes with unbounded outputs. It can work, so only failing runs are reported."""
    if ends.loss != "mse_loss" or not ends.is_class or not ends.width > 2 or ends.rows >= ALMOST:
        return None
    if ends.low >= 0 and ends.high <= 1:
        return None
    state = learned(window)
    if state is None or not (state.has_diverged or state.left > 0.7):
        return None
    return Verdict(
        "The model does not learn: its loss is a squared error between one-hot classes and unbounded outputs.",
        "Use `nn.CrossEntropyLoss()` on the same outputs.",
        (Evidence("data/output/max", ends.high, "0 to 1", meaning="largest output"),),
        0.6,
        "warning",
    )
