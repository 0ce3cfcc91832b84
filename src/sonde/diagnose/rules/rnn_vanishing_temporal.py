"""What a recurrent layer saw at the start of a sequence is lost before its end, and the model does not learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.memory_span import Span, memory_spans
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

LOST: Final = 1e-3
"""Reach below which the first input no longer counts. Layers that learn to remember come above 0.01 at once."""
STILL_THERE: Final = 0.75
"""Share of the loss that is left: tasks that need no memory are learnt whatever the reach."""


@rule(
    severity="warning",
    causes=(
        "vanishing_gradients",
        "underfitting",
        "lr_too_low",
        "init_scale",
        "saturated_activations",
        "constant_output",
    ),
    references=("Pascanu et al. 2013", "Jozefowicz et al. 2015, forget bias", "Hochreiter 1991"),
)
def rnn_vanishing_temporal(window: Window) -> Iterator[Found]:
    """Gradients vanish on their way back in time: long memories cannot be learnt."""
    state = learned(window)
    if state is None or state.has_diverged or not state.left > STILL_THERE:
        return
    lost = [span for span in memory_spans(window) if span.start < LOST and span.end < LOST]
    if not lost:
        return
    worst = min(lost, key=lambda span: span.end)
    yield Found(
        f"{worst.site} forgets: of the first of {worst.length} time steps {_share(worst.end)} reaches the last one, "
        f"from step {worst.first_step} on, and {state.left:.0%} of the loss is still there",
        step=worst.first_step,
        confidence=0.85,
        sites=[span.site for span in lost],
        evidence=[
            Evidence(
                f"rnn/{worst.site}/reach",
                worst.end,
                "above 0.01",
                worst.first_step,
                "gradient at first over last input",
            ),
            Evidence(state.name, state.left, "well below 0.75", meaning="share of the loss that is left"),
        ],
        remedy=_remedy(window, worst),
    )


def _share(reach: float) -> str:
    return f"a share of {reach:.0e}" if reach > 1e-30 else "nothing"


def _remedy(window: Window, span: Span) -> str:
    module = structure(window).module(span.site)
    kind = module.type if module is not None else ""
    if "LSTM" in kind:
        return (
            f"open the forget gate: n = {span.site}.hidden_size; {span.site}.bias_hh_l0.data[n:2*n] = 2.0 "
            "(and bias_ih_l0 to 0); or read the sequence through attention"
        )
    if "GRU" in kind:
        return f"keep more: n = {span.site}.hidden_size; {span.site}.bias_hh_l0.data[n:2*n] = 2.0 (the update gate)"
    return (
        f"nn.init.orthogonal_({span.site}.weight_hh_l0) keeps the length of a gradient; better, nn.LSTM with its "
        "forget bias at 1 to 3"
    )
