"""A deep post-norm transformer given its full learning rate from the first step on stalls where guessing would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.curves import nanmax
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Structure, structure
from sonde.diagnose.measures.motion import NEEDS, motion
from sonde.diagnose.measures.rate import RATE, is_adaptive, rate, warms_up
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MIN_BLOCKS: Final = 4
STALLED: Final = 0.75
MOVES: Final = 0.005
"""Largest share of its size that a matrix moves in the first updates; below it steps are not what stalls."""


@rule(
    severity="warning",
    needs=NEEDS,
    causes=(
        *("underfitting", "loss_plateau", "constant_output", "vanishing_gradients", "rank_collapse", "lr_too_high"),
        *("exploding_gradients", "attention_entropy_collapse", "output_logit_growth", "dead_relu"),
    ),
    references=("Xiong et al. 2020, On Layer Normalization in the Transformer Architecture", "Liu et al. 2020, RAdam"),
)
def missing_warmup(window: Window) -> Iterator[Found]:
    """A deep transformer with its norms after the residual sums was trained without a warm-up, and stalls."""
    moved, loss = motion(window), learned(window)
    known = structure(window)
    blocks = postnorm_blocks(known)
    if moved is None or loss is None or len(blocks) < MIN_BLOCKS or not is_adaptive(window) or warms_up(window):
        return
    if not moved.at_first > MOVES or not (loss.best_left > STALLED or loss.has_diverged):
        return
    steps, values = rate(window)
    if not len(values):
        return
    last = int(loss.steps[-1])
    yield Found(
        f"the loss has stalled at {loss.left:.0%} of its start: {len(blocks)} blocks with the norm after the residual "
        f"sum got the full learning rate of {values[0]:g} at the first step",
        step=int(steps[0]),
        confidence=0.75,
        sites=blocks[-1:],
        evidence=[
            Evidence(
                RATE, float(values[0] / nanmax(values)), "below 0.1 at the first step", int(steps[0]), "of its peak"
            ),
            Evidence(loss.name, loss.left, "falling", last, "share of the loss that is left"),
        ],
        remedy="scheduler = LambdaLR(optimizer, lambda step: min(1, (step + 1) / "
        f"{max(10, min(4000, (last + 1) // 10 * 3))})), stepped per batch; or the norms first (norm_first=True).",
    )


def postnorm_blocks(known: Structure) -> list[str]:
    """Blocks whose attention runs before any of their norms."""
    blocks = []
    for module in known.modules:
        if module.kind != "attention" or module.order < 0:
            continue
        block = module.name.rpartition(".")[0]
        norms = [
            m.order for m in known.modules if m.kind == "norm" and m.order >= 0 and m.name.rpartition(".")[0] == block
        ]
        if norms and min(norms) > module.order:
            blocks.append(block)
    return blocks
