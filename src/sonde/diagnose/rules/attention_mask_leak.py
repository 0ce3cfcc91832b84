"""A language model whose attention sees the tokens it is asked to predict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.data import is_language_model
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

LEAK: Final = 1e-3
"""Mean probability on keys after the query. With a causal mask it is exactly zero."""
MIN_SEEN: Final = 2


@rule(
    severity="critical",
    causes=("overfitting", "data_duplication"),
    references=("Vaswani et al. 2017", "DEForm, mask operators"),
)
def attention_mask_leak(window: Window) -> Iterator[Found]:
    """The model reads its own answer: no causal mask, though targets are the next tokens.

    If other layers are masked, a layer that attends to a sequence of another length does not see the targets: it
    encodes a picture or a prompt.
    """
    if not is_language_model(window):
        return
    leaks, masked = {}, set()
    for site, steps, values in window.by_site("attn/*/future"):
        is_leak = np.isfinite(values) & (values > LEAK)
        # A mask leaves exactly nothing: a few looks are enough, and it may be lost halfway.
        if is_leak.sum() >= MIN_SEEN:
            leaks[site] = float(np.median(values[is_leak])), int(steps[is_leak][0])
        else:
            masked.add(site)
    lengths = {_length(window, site) for site in masked}
    leaks = {site: leak for site, leak in leaks.items() if not masked or _length(window, site) in lengths}
    if not leaks:
        return
    site, (share, step) = max(leaks.items(), key=lambda item: item[1][0])
    where = site if len(leaks) == 1 else f"{site} and {len(leaks) - 1} more"
    yield Found(
        f"from step {step} on, {where} gives {share:.0%} of its attention to tokens after the query, and those are "
        "the targets: the loss says nothing about predicting",
        step=step,
        confidence=0.95,
        sites=list(leaks),
        evidence=[
            Evidence(f"attn/{site}/future", share, "0 in a language model", step, "share of attention on later keys"),
            Evidence("data/target/shift", 1.0, meaning="targets are the inputs, one step on"),
        ],
        remedy="F.scaled_dot_product_attention(q, k, v, is_causal=True); written out: "
        "scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -inf); nn.TransformerEncoder: "
        "mask=nn.Transformer.generate_square_subsequent_mask(T)",
    )


def _length(window: Window, site: str) -> float:
    """Keys that a layer attends to, at first; 0: not known."""
    keys = window.get(f"attn/{site}/keys")[1]
    return float(keys[0]) if len(keys) else 0.0
