"""Residual blocks pass on only part of their input: after a few blocks, input and gradient are lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Module, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import percent
from sonde.schema.window import Window

MIN_BLOCKS: Final = 3
LEFT: Final = 0.15
"""Fraction of the residual stream left after all blocks; 1 with intact skip connections."""
WHOLE: Final = 0.65
"""Blocks that pass on about this fraction are residual blocks with a ReLU or a strong branch."""
NEARLY: Final = 0.9
"""Up to this fraction, it must be the same in every block, which shows that it was chosen."""
EARLY: Final = 10


@rule(
    severity="warning",
    causes=(
        "vanishing_gradients",
        "underfitting",
        "rank_collapse",
        "lr_too_low",
        "missing_warmup",
        "bottleneck_layer",
        "dead_relu",
        "qkv_imbalance",
    ),
    references=("He et al. 2016, Identity Mappings", "Takase et al. 2023, Spike No More", "Dong et al. 2021"),
)
def residual_decay(window: Window) -> Iterator[Found]:
    """Residual blocks lose their input because the skip connection is scaled down or missing."""
    for blocks in _stacks(window):
        carries = np.asarray([_early(window, block) for block in blocks])
        if len(blocks) < 2 or not np.isfinite(carries).all() or _ends_in_norm(window, blocks[-1]):
            continue
        typical = float(np.median(carries))
        left = float(np.prod(np.clip(carries, 0.0, 1.0)))
        is_scaled = left < LEFT and _is_chosen(carries)
        is_missing = abs(typical) <= 0.3 and len(blocks) >= MIN_BLOCKS and _is_transformer(window, blocks[0])
        if is_scaled or is_missing:
            yield _finding(window, blocks, typical, left, is_missing=is_missing and not is_scaled)
            return


def _stacks(window: Window) -> list[list[Module]]:
    """Blocks of the same type, in the order in which they run."""
    stacks: dict[tuple[str, str], list[Module]] = defaultdict(list)
    for module in structure(window).in_order:
        if len(window.get(f"unit/{module.name}/skip_gain")[0]):
            stacks[module.type, module.name.rpartition(".")[0]].append(module)
    return list(stacks.values())


def _early(window: Window, block: Module) -> float:
    steps, values = window.get(f"unit/{block.name}/skip_gain")
    early = values[(steps <= steps[0] + EARLY) & np.isfinite(values)]
    return float(np.median(early)) if len(early) else float("nan")


def _is_chosen(carries: NDArray[np.float64]) -> bool:
    """Whether all blocks pass on the same fraction: a chosen scale is the same in every block, chance is not."""
    typical = float(np.median(carries))
    spread = 1.48 * float(np.median(np.abs(carries - typical))) / max(abs(typical), 1e-9)
    if len(carries) < MIN_BLOCKS:
        return 0.15 < typical < WHOLE and spread < 0.1
    return (0.1 < typical < WHOLE and spread < 0.25) or (WHOLE <= typical < NEARLY and spread < 0.03)


def _children(window: Window, block: Module) -> list[Module]:
    return [module for module in structure(window).in_order if module.name.startswith(f"{block.name}.")]


def _ends_in_norm(window: Window, block: Module) -> bool:
    """Whether the block is post-norm: its norm scales the stream down by design."""
    leaves = [module for module in _children(window, block) if module.is_leaf and module.kind != "dropout"]
    return bool(leaves) and leaves[-1].kind == "norm"


def _is_transformer(window: Window, block: Module) -> bool:
    """Whether it is a whole transformer block: attention, and linear layers outside it. Skip connections are inside."""
    inside = _children(window, block)
    attention = {module.name for module in inside if module.kind == "attention"}
    attention |= {name.site for name in window.names("attn/*/entropy") if name.site.startswith(f"{block.name}.")}
    outside = [
        module
        for module in inside
        if module.kind == "linear" and not any(module.name.startswith(f"{name}.") for name in attention)
    ]
    return bool(attention and outside) and block.kind != "attention"


def _finding(window: Window, blocks: list[Module], typical: float, left: float, *, is_missing: bool) -> Found:
    first, last = blocks[0].name, blocks[-1].name
    passed = percent(max(typical, 0.0))
    message = (
        f"The {len(blocks)} blocks from {first} to {last} have passed on only {passed} of their input from the start: "
        "they have no skip connection."
        if is_missing
        else f"Each of the {len(blocks)} blocks from {first} to {last} has passed on only {passed} of its input from "
        f"the start, so only {percent(max(left, 0.0))} of it reaches the end."
    )
    return Found(
        message,
        step=int(window.get(f"unit/{first}/skip_gain")[0][0]),
        confidence=0.9,
        sites=[block.name for block in blocks],
        evidence=[
            Evidence(
                f"unit/{first}/skip_gain", typical, "0.9 to 1.1", meaning="fraction of its input a block passes on"
            ),
            Evidence(f"unit/{last}/skip_gain", left, "above 0.5", meaning="fraction left after all blocks"),
        ],
        remedy=f"Use a skip connection with weight 1 in `{blocks[0].type}.forward`: `return x + branch(norm(x))`.",
    )
