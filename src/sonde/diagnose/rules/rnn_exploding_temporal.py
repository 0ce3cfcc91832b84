"""A recurrent layer amplifies the start of a sequence: gradients grow with every step back in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.memory_span import memory_spans
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number, since
from sonde.schema.window import Window

LOUD: Final = 50.0
"""Reach at the start: five times the top of the healthy range. A layer that learns to remember one early input may
reach 1,000, but never starts there."""
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
    """Gradients explode on their way back through time."""
    loud = [span for span in memory_spans(window) if span.start > LOUD and span.per_step(span.start) > PER_STEP]
    if not loud:
        return
    worst = max(loud, key=lambda span: span.start)
    yield Found(
        f"The recurrent layer {worst.site} has amplified gradients {since(worst.first_step)}: by a factor of "
        f"{worst.per_step(worst.start):.2f} for every step back in time, {number(worst.start)} over "
        f"{worst.length:,} steps.",
        step=worst.first_step,
        confidence=0.85,
        sites=[span.site for span in loud],
        evidence=[
            Evidence(
                f"rnn/{worst.site}/reach", worst.start, "0.01 to 10 at the start", worst.first_step,
                "gradient at the first input / the last",
            )
        ],
        remedy=f"Initialise with `nn.init.orthogonal_({worst.site}.weight_hh_l0)` (gain 1), and clip gradients before "
        "`optimizer.step()`: `torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`.",
    )  # fmt: skip
