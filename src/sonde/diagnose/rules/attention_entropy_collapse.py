"""Heads that look at one key whatever the query: their softmax is saturated, and gradients no longer pass it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import Levels, levels
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

COLLAPSED: Final = 0.1
"""Normalised entropy of a head. Heads that copy may be as sharp for good reason; so a second sign is asked for."""
LOUD: Final = 50.0
"""Largest attention logit of any layer; none of the healthy runs reaches it."""
POOR: Final = 0.5
"""Share of the loss that is left: a sharp head in a model that has learnt is doing its work."""


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
    where = site if len(sharp) == 1 else f"{site} (and {len(sharp) - 1} more)"
    yield Found(
        f"a head of {where} has looked at practically one key only since step {entropy.since}: its entropy is "
        f"{entropy.end:.2g} of what it could be, with logits up to {logit.end:.3g}",
        step=entropy.since,
        confidence=0.8,
        sites=list(sharp),
        evidence=[
            Evidence(f"attn/{site}/entropy_min", entropy.end, "above 0.1", entropy.since),
            Evidence(f"attn/{site}/logit_max", logit.end, "below 50", meaning="largest logit"),
        ],
        remedy=f"normalise queries and keys before their product in {site} (nn.LayerNorm(head_dim) on each), "
        "divide logits by sqrt(head_dim), start query and key weights at 0.02, and lower the learning rate",
    )


def _sharp(window: Window) -> dict[str, tuple[Levels, Levels]]:
    """Attentions with a head that stayed collapsed, where the logits or the loss say that it is no virtue."""
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
