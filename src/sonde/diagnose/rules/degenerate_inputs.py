"""The inputs are all the same: zeros, or one row repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import onset
from sonde.diagnose.measures.data import seen
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import since
from sonde.schema.window import Window

SAME: Final = 1e-6
MIN_INSPECTIONS: Final = 3


@rule(
    severity="critical",
    causes=(
        "underfitting", "constant_output", "label_shuffling", "data_duplication", "dead_relu", "vanishing_gradients",
        "rank_collapse", "lr_too_low", "unnormalised_inputs", "symmetric_init", "class_imbalance", "detached_graph",
        "bottleneck_layer", "init_scale", "frozen_layers", "saturated_activations", "rnn_vanishing_temporal",
        "adam_epsilon_dominates", "missing_zero_grad",
    ),
    references=("Ben Braiek and Khomh 2022, TheDeepChecker: data-dependency test",),
)  # fmt: skip
def degenerate_inputs(window: Window) -> Iterator[Found]:
    """All samples of a batch are identical, so there is nothing to learn from them."""
    size, spread = seen(window, "data/input/size"), seen(window, "data/input/sample_std")
    if len(spread) < MIN_INSPECTIONS or not size.typical > 1:
        return
    is_same = spread.values < SAME
    if is_same.mean() < 0.5:
        return
    is_zero = seen(window, "data/input/abs_max").typical == 0
    what = "all zero" if is_zero else "the same for every sample of a batch"
    step = onset(spread.steps, is_same)
    yield Found(
        f"The model's inputs have been {what} {since(step)}: the model can only learn how frequent each target is.",
        step=step,
        confidence=0.95,
        remedy="Inspect `next(iter(loader))[0]`. Check that the dataset uses its index, that the files are read and "
        "that no mask is inverted.",
        evidence=(
            Evidence("data/input/sample_std", spread.typical, "about 1", step, "difference between samples"),
            Evidence(
                "data/input/abs_max", seen(window, "data/input/abs_max").typical, "above 0", step, "largest input"
            ),
        ),
    )
