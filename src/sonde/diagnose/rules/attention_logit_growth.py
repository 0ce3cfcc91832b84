"""Attention logits keep growing until every softmax is one-hot and training breaks down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import levels
from sonde.diagnose.measures.model import structure
from sonde.diagnose.measures.rate import one_digit
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import number
from sonde.schema.window import Window

LOUD: Final = 50.0
"""A softmax over logits this far apart is one-hot; no healthy run reaches it."""
GROWTH: Final = 3.0
"""Minimum growth; logits that start large point to the initialisation or to a missing scale."""


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
    """Attention logits have grown so large that the softmax is one-hot."""
    grown = {}
    for site, _, _ in window.by_site("attn/*/logit_max"):
        logit = levels(window, f"attn/{site}/logit_max")
        if logit is not None and logit.end > LOUD and logit.growth > GROWTH:
            grown[site] = logit
    if not grown:
        return
    site, worst = max(grown.items(), key=lambda item: item[1].end)
    rate = structure(window).group_value("lr")
    has_rate = isinstance(rate, int | float) and rate
    lower = f" Lower the learning rate: `lr={one_digit(rate / 10)}` (now {number(rate, 3)})." if has_rate else ""
    yield Found(
        f"The attention logits of {site} have grown from {number(worst.start)} to {number(worst.end, 3)}, "
        f"mostly by step {worst.since:,}.",
        step=worst.since,
        confidence=0.8,
        sites=list(grown),
        evidence=[
            Evidence(f"attn/{site}/logit_max", worst.end, "below 50", worst.since, "largest logit"),
            Evidence(f"attn/{site}/logit_max", worst.growth, meaning="largest logit / its starting value"),
        ],
        remedy=f"Normalise queries and keys in {site}: `q, k = self.q_norm(q), self.k_norm(k)`, with an "
        f"`nn.LayerNorm(head_dim)` each.{lower}",
    )
