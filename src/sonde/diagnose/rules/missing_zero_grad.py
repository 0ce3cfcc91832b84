"""Gradients are never cleared: each step follows the sum of all gradients so far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax, nanmean, nanmedian
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.total_gradient import NEEDS, total_norm
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, since
from sonde.schema.window import Window

MIN_STEPS: Final = 20
ALIKE: Final = 0.9
"""Median cosine of successive gradients. Healthy mini-batches stay below 0.5; full batches also come close to 1."""
ALIKE_LATER: Final = 0.7
GROWTH: Final = 2.0
"""Growth of the gradient norm over the first steps: a sum grows with every step, fresh gradients do not."""
NOISY: Final = 0.01
"""Change of the loss from batch to batch, relative to the loss; with full batches it is smooth."""
GROWING_STEPS: Final = 12
SOME_GROWTH: Final = 1.8
"""The same limit if the direction of the gradient hardly changes in the whole run."""
HARDLY_TURNS: Final = 0.97
"""Median cosine over a run with different batches; fresh gradients of different batches never come close to it."""


@rule(
    severity="warning",
    needs=NEEDS,
    causes=(
        *("lr_too_high", "exploding_gradients", "loss_oscillation", "loss_spikes", "loss_divergence", "nan_inf"),
        *("dead_relu", "underfitting", "saturated_activations", "output_logit_growth", "flipped_gradient"),
        *("clip_too_tight", "loss_plateau", "adam_second_moment_underestimate", "constant_output", "bad_batches"),
        *("attention_logit_growth", "attention_entropy_collapse"),
    ),
    references=("Jiang et al. 2025, TrainCheck: zero_grad precedes backward (stackoverflow 60335387)",),
)
def missing_zero_grad(window: Window) -> Iterator[Found]:
    """Gradients of earlier steps are never cleared: zero_grad is missing."""
    cosines = window.get("model/model/grad_cosine")[1]
    kept_steps, kept = window.get("model/model/grad_kept")
    steps, norms = total_norm(window)
    if min(len(cosines), len(kept), len(norms)) < MIN_STEPS // 2 or len(norms) < MIN_STEPS:
        return
    # An accumulating loop clears its gradients at every optimizer step, and so does one that sets them to None.
    early_cosine = float(nanmedian(cosines[:MIN_STEPS]))
    if nanmean(kept) < 0.9 or not early_cosine > ALIKE or not nanmedian(cosines) > ALIKE_LATER:
        return
    early = norms[:GROWING_STEPS]
    growth = float(nanmax(early) / norms[0]) if norms[0] > 0 else np.nan
    hardly_turns = nanmedian(cosines) > HARDLY_TURNS and _batches_differ(window)
    if not growth > (SOME_GROWTH if hardly_turns else GROWTH):
        return
    yield Found(
        f"Gradients are never cleared: they have accumulated {since(int(kept_steps[0]))}, successive gradients point "
        f"the same way (cosine {early_cosine:.2f}), and their norm grew {number(growth)}-fold in the first "
        f"{len(early)} steps.",
        step=int(steps[0]),
        confidence=0.9,
        evidence=[
            Evidence("model/model/grad_cosine", early_cosine, "-0.3 to 0.9", None, "cosine of successive gradients"),
            Evidence("model/model/grad_kept", float(nanmean(kept)), "0", None, "fraction of steps with old gradients"),
            Evidence("grad/*/norm_preclip", growth, "below 2", int(steps[0]), "growth of the gradient norm"),
        ],
        remedy="Call `optimizer.zero_grad(set_to_none=True)` before every `loss.backward()`.",
    )


def _batches_differ(window: Window) -> bool:
    """Whether steps used different batches; with a few fixed batches, the gradient direction hardly changes either."""
    hashes = window.get("data/batch/hash")[1]
    loss = learned(window)
    if loss is None or len(hashes) < MIN_STEPS or len(np.unique(hashes)) <= 8:
        return False
    values = loss.values[np.isfinite(loss.values)]
    bends = np.abs(np.diff(values, 2))
    return bool(np.median(bends) > NOISY * np.median(np.abs(values)))
