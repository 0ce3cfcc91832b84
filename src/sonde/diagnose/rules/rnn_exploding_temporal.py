"""A recurrent layer multiplies what it saw at the start of a sequence: gradients grow with every step back in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.memory_span import memory_spans
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

LOUD: Final = 300.0
"""Reach at the start. A layer that has learnt to remember one early input may come to 1,000; it never begins so."""
PER_STEP: Final = 1.08
"""Growth per time step."""


@rule(
    severity="warning",
    causes=(
        "exploding_gradients", "loss_oscillation", "loss_spikes", "clip_too_tight", "nan_inf", "underfitting",
        "init_scale", "saturated_activations", "output_logit_growth", "lr_too_high",
    ),
    references=("Pascanu et al. 2013", "Le et al. 2015, identity initialisation"),
)  # fmt: skip
def rnn_exploding_temporal(window: Window) -> Iterator[Found]:
    """Gradients explode on their way back in time."""
    loud = [span for span in memory_spans(window) if span.start > LOUD and span.per_step(span.start) > PER_STEP]
    if not loud:
        return
    worst = max(loud, key=lambda span: span.start)
    yield Found(
        f"{worst.site} multiplies gradients by {worst.per_step(worst.start):.2f} on every step back in time, "
        f"{worst.start:.0e} over {worst.length} of them, from step {worst.first_step} on",
        step=worst.first_step,
        confidence=0.85,
        sites=[span.site for span in loud],
        evidence=[
            Evidence(
                f"rnn/{worst.site}/reach", worst.start, "0.01 to 10 at the start", worst.first_step,
                "gradient at first over last input",
            )
        ],
        remedy=f"nn.init.orthogonal_({worst.site}.weight_hh_l0) with gain 1, and "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()",
    )  # fmt: skip
