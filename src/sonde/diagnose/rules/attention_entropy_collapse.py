"""Heads attend to one key whatever the query: their softmax is saturated and passes no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Levels, levels
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, number, percent, since
from sonde.schema.window import Window

COLLAPSED: Final = 0.1
"""Normalised entropy of a head. Copy heads may rightly be that sharp, so a second sign is required."""
LOUD: Final = 50.0
"""Largest attention logit of any layer; no healthy run reaches it."""
POOR: Final = 0.5
"""Final loss as a fraction of its start: in a model that has learned, a sharp head is doing its job."""


@rule(
    severity="warning",
    is_measured=True,
    causes=("underfitting", "vanishing_gradients", "rank_collapse", "loss_oscillation"),
    references=("Zhai et al. 2023, sigmaReparam", "Dehghani et al. 2023, ViT-22B", "Wortsman et al. 2023"),
)
def attention_entropy_collapse(window: Window) -> Iterator[Found]:
    """Attention has collapsed onto single keys."""
    sharp = _sharp(window)
    if not sharp:
        return
    site, (entropy, logit) = min(sharp.items(), key=lambda item: item[1][0].end)
    where = site if len(sharp) == 1 else f"{site} (and of {counted(len(sharp) - 1, 'more layer')})"
    yield Found(
        f"A head of {where} has attended almost entirely to one key {since(entropy.since)}: its entropy is "
        f"{percent(entropy.end)} of the maximum, with logits up to {number(logit.end, 3)}.",
        step=entropy.since,
        confidence=0.8,
        sites=list(sharp),
        evidence=[
            Evidence(f"attn/{site}/entropy_min", entropy.end, "above 0.1", entropy.since, "entropy / maximum entropy"),
            Evidence(f"attn/{site}/logit_max", logit.end, "below 50", meaning="largest logit"),
        ],
        remedy=f"Normalise queries and keys before their product in {site}, with an `nn.LayerNorm(head_dim)` each. "
        "Divide logits by `sqrt(head_dim)`, initialise query and key weights with a standard deviation of 0.02, and "
        "lower the learning rate.",
    )


def _sharp(window: Window) -> dict[str, tuple[Levels, Levels]]:
    """Attention layers with a head that stayed collapsed, where the logits or the loss show that it does harm."""
    state = learned(window)
    is_poor = state is not None and not state.has_diverged and state.left > POOR
    logits = [levels(window, f"attn/{site}/logit_max") for site, _, _ in window.by_site("attn/*/logit_max")]
    is_loud = any(logit is not None and logit.end > LOUD for logit in logits)
    sharp = {}
    for site, _, _ in window.by_site("attn/*/entropy_min"):
        entropy, logit = levels(window, f"attn/{site}/entropy_min"), levels(window, f"attn/{site}/logit_max")
        if entropy is None or logit is None or not max(entropy.end, entropy.late) < COLLAPSED:
            continue
        if is_loud or (is_poor and logit.end > LOUD / 5):
            sharp[site] = entropy, logit
    return sharp
