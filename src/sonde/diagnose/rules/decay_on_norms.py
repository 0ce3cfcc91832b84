"""Weight decay is applied to norms and biases, where it does not help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Parameter, Structure, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, listed, number
from sonde.schema.window import Window

NOTABLE: Final = 0.05
"""Weight decay below this hardly moves a norm's gain."""


@rule(
    severity="info",
    references=(
        "Loshchilov and Hutter 2019, AdamW",
        "Karpathy, nanoGPT: no decay for tensors with fewer than 2 dimensions",
    ),
)
def decay_on_norms(window: Window) -> Iterator[Found]:
    """Weight decay also pulls biases and the gains of norms towards zero."""
    known = structure(window)
    hit = [p for p in known.parameters if p.trainable and _is_gain_or_bias(p) and _decay(known, p) >= NOTABLE]
    if not hit or not any(p.is_norm for p in hit):
        return
    decay = _decay(known, hit[0])
    yield Found(
        f"A weight decay of {number(decay, 3)} is also applied to "
        f"{counted(len(hit), 'norm or bias parameter', 'norm and bias parameters')}: {listed([p.name for p in hit])}.",
        step=max(window.last_step, 0),
        confidence=0.6,
        sites=[p.name for p in hit[:3]],
        evidence=[Evidence("weight_decay", decay, "0 for norms and biases")],
        remedy="Exclude them from weight decay: `decay = [p for p in model.parameters() if p.ndim >= 2]; "
        "rest = [p for p in model.parameters() if p.ndim < 2]; "
        f"{known.optimizer_type}([{{'params': decay}}, {{'params': rest, 'weight_decay': 0.0}}], ...)`.",
    )


def _is_gain_or_bias(parameter: Parameter) -> bool:
    return parameter.is_norm or len(parameter.shape) < 2


def _decay(known: Structure, parameter: Parameter) -> float:
    return float(known.group_of(parameter).get("weight_decay") or 0.0)
