"""A recurrent layer forgets the start of a sequence before its end, and the model does not learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.memory_span import Span, memory_spans
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent, since
from sonde.schema.window import Window

LOST: Final = 1e-3
"""Reach below which the first input no longer matters. Layers that learn to remember quickly exceed 0.01."""
STILL_THERE: Final = 0.75
"""Final loss as a fraction of its start; tasks that need no memory are learned whatever the reach."""


@rule(
    severity="warning",
    causes=(
        "vanishing_gradients",
        "underfitting",
        "init_scale",
        "saturated_activations",
        "constant_output",
    ),
    references=("Pascanu et al. 2013", "Jozefowicz et al. 2015, forget bias", "Hochreiter 1991"),
)
def rnn_vanishing_temporal(window: Window) -> Iterator[Found]:
    """Gradients vanish on their way back through time, so the model cannot learn long-range dependencies."""
    state = learned(window)
    if state is None or state.has_diverged or not state.left > STILL_THERE:
        return
    lost = [span for span in memory_spans(window) if span.start < LOST and span.end < LOST]
    if not lost:
        return
    worst = min(lost, key=lambda span: span.end)
    yield Found(
        f"The recurrent layer {worst.site} has forgotten its first input {since(worst.first_step)}: over "
        f"{worst.length:,} time steps, {_fraction(worst.end)} of the gradient reaches it, and {state.outcome}.",
        step=worst.first_step,
        confidence=0.85,
        sites=[span.site for span in lost],
        evidence=[
            Evidence(
                f"rnn/{worst.site}/reach",
                worst.end,
                "above 0.01",
                worst.first_step,
                "gradient at the first input / the last",
            ),
            state.left_evidence(0.75),
        ],
        remedy=_remedy(window, worst),
    )


def _fraction(reach: float) -> str:
    return f"only {percent(reach)}" if reach > 1e-30 else "nothing"


def _remedy(window: Window, span: Span) -> str:
    module = structure(window).module(span.site)
    kind = module.type if module is not None else ""
    if "LSTM" in kind:
        return (
            f"Open the forget gate: `n = {span.site}.hidden_size; {span.site}.bias_hh_l0.data[n:2*n] = 2.0`, with "
            "`bias_ih_l0` at 0. Or read the sequence through attention."
        )
    if "GRU" in kind:
        return f"Open the update gate: `n = {span.site}.hidden_size; {span.site}.bias_hh_l0.data[n:2*n] = 2.0`."
    return (
        "Use `nn.LSTM` with a forget bias of 1 to 3, or at least an initialisation that preserves the norm of "
        f"gradients: `nn.init.orthogonal_({span.site}.weight_hh_l0)`."
    )
