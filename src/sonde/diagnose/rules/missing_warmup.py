"""A deep post-norm transformer that gets its full learning rate from the first step stalls at a constant prediction."""

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
from sonde.diagnose.wording import number
from sonde.schema.window import Window

MIN_BLOCKS: Final = 4
STALLED: Final = 0.75
MOVES: Final = 0.005
"""Largest of the first updates relative to the weight matrix; below it, large steps are not the cause."""


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
    """A deep post-norm transformer is trained without a warm-up and stalls."""
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
        f"Training has stalled without a warm-up: {len(blocks)} post-norm blocks got the full learning rate of "
        f"{number(float(values[0]), 3)} at the first step, and {loss.outcome}.",
        step=int(steps[0]),
        confidence=0.75,
        sites=blocks[-1:],
        evidence=[
            Evidence(
                RATE,
                float(values[0] / nanmax(values)),
                "below 0.1 at the first step",
                int(steps[0]),
                "first learning rate / its peak",
            ),
            loss.left_evidence(),
        ],
        remedy="Warm up the learning rate, stepping the scheduler after every batch: `scheduler = LambdaLR(optimizer, "
        f"lambda step: min(1, (step + 1) / {max(10, min(4000, (last + 1) // 10 * 3))}))`. "
        "Or put the norms first: `norm_first=True`.",
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
