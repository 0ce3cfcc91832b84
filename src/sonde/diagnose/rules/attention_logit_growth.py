"""Attention logits that keep growing: soon each softmax is one-hot, and training breaks off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import levels
from sonde.diagnose.measures.model import structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

LOUD: Final = 50.0
"""A softmax over logits this far apart is one-hot; none of the healthy runs reaches it."""
GROWTH: Final = 3.0
"""What began that large has not grown: that is a matter of initialisation or of a missing scale."""


@rule(
    severity="warning",
    is_measured=True,
    causes=("underfitting", "vanishing_gradients", "loss_oscillation"),
    references=(
        "Dehghani et al. 2023, ViT-22B",
        "Wortsman et al. 2023, small-scale proxies",
        "Henry et al. 2020, QK-norm",
    ),
)
def attention_logit_growth(window: Window) -> Iterator[Found]:
    """Attention logits have grown beyond what a softmax can use."""
    grown = {}
    for site, _, _ in window.by_site("attn/*/logit_max"):
        logit = levels(window, f"attn/{site}/logit_max")
        if logit is not None and logit.end > LOUD and logit.growth > GROWTH:
            grown[site] = logit
    if not grown:
        return
    site, worst = max(grown.items(), key=lambda item: item[1].end)
    rate = structure(window).group_value("lr")
    lower = f", and lr={rate / 10:.0e} in place of {rate:g}" if isinstance(rate, int | float) and rate else ""
    yield Found(
        f"the attention logits of {site} have grown from {worst.start:.2g} to {worst.end:.3g}, "
        f"most of it by step {worst.since}",
        step=worst.since,
        confidence=0.8,
        sites=list(grown),
        evidence=[
            Evidence(f"attn/{site}/logit_max", worst.end, "below 50", worst.since, "largest logit"),
            Evidence(f"attn/{site}/logit_max", worst.growth, meaning="largest logit over that at the start"),
        ],
        remedy=f"normalise queries and keys in {site}: q, k = self.q_norm(q), self.k_norm(k) with "
        f"nn.LayerNorm(head_dim) each{lower}",
    )
