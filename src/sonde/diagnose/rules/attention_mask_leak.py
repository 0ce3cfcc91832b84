"""The attention of a language model sees the tokens that it should predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import is_language_model
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, percent, since
from sonde.schema.window import Window

LEAK: Final = 1e-3
"""Mean attention probability on keys after the query; exactly zero with a causal mask."""
MIN_SEEN: Final = 2


@rule(
    severity="critical",
    causes=("overfitting", "data_duplication"),
    references=("Vaswani et al. 2017", "DEForm, mask operators"),
)
def attention_mask_leak(window: Window) -> Iterator[Found]:
    """The model can see its targets: there is no causal mask, although the targets are the next tokens.

    If other layers are masked, an unmasked layer over a sequence of a different length is not a leak: it encodes an
    image or a prompt.
    """
    if not is_language_model(window):
        return
    leaks, masked = {}, set()
    for site, steps, values in window.by_site("attn/*/future"):
        is_leak = np.isfinite(values) & (values > LEAK)
        # A mask leaves exactly zero, so a few inspections are enough; it may also be lost midway.
        if is_leak.sum() >= MIN_SEEN:
            leaks[site] = float(np.median(values[is_leak])), int(steps[is_leak][0])
        else:
            masked.add(site)
    lengths = {_length(window, site) for site in masked}
    leaks = {site: leak for site, leak in leaks.items() if not masked or _length(window, site) in lengths}
    if not leaks:
        return
    site, (share, step) = max(leaks.items(), key=lambda item: item[1][0])
    where = site if len(leaks) == 1 else f"{site} (and in {counted(len(leaks) - 1, 'more layer')})"
    yield Found(
        f"The attention in {where} has seen future tokens {since(step)}: {percent(share)} of its weight is on tokens "
        "after the query. Those are the targets, so the loss does not measure prediction.",
        step=step,
        confidence=0.95,
        sites=list(leaks),
        evidence=[
            Evidence(
                f"attn/{site}/future", share, "0 in a language model", step, "fraction of attention on later keys"
            ),
            Evidence("data/target/shift", 1.0, meaning="targets are the inputs shifted by one token"),
        ],
        remedy="Add a causal mask: `F.scaled_dot_product_attention(q, k, v, is_causal=True)`. With explicit scores: "
        "`scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -inf)`. With `nn.TransformerEncoder`: "
        "`mask=nn.Transformer.generate_square_subsequent_mask(T)`.",
    )


def _length(window: Window, site: str) -> float:
    """Number of keys that a layer attends to at the start; 0 if unknown."""
    keys = window.get(f"attn/{site}/keys")[1]
    return float(keys[0]) if len(keys) else 0.0
