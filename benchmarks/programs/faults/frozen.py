"""Layers that are frozen by mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import nn

from programs.fault import (
    fault,
    is_in,
    is_not_lora,
)
from programs.setup import Setup


def _freeze(chosen: Callable[[list[nn.Parameter]], list[nn.Parameter]]) -> Callable[[Setup, int], None]:
    def plant(s: Setup, level: int) -> None:
        s.edits.append(lambda model: [p.requires_grad_(False) for p in chosen(list(model.parameters()))])

    return plant


FROZEN: Final = (
    "underfitting",
    "loss_plateau",
    "optimizer_missing_params",
    "bottleneck_layer",
    "lr_too_low",
    "rank_collapse",
    "detached_graph",
    "vanishing_gradients",
)
fault("frozen_all_but_head", "frozen_layers", also=FROZEN, num=5, where=is_not_lora)(_freeze(lambda p: p[:-2]))
fault("frozen_all_but_stem", "frozen_layers", also=FROZEN, num=4, where=is_not_lora)(_freeze(lambda p: p[2:]))
fault("frozen_first_half", "frozen_layers", also=FROZEN, num=4, where=is_not_lora)(_freeze(lambda p: p[: len(p) // 2]))
fault("frozen_hidden", "frozen_layers", also=FROZEN, num=4, where=is_not_lora)(_freeze(lambda p: p[2:-2]))
fault("frozen_matrices", "frozen_layers", also=FROZEN, num=4, where=is_not_lora)(
    _freeze(lambda p: [w for w in p if w.dim() > 1])
)


@fault(
    "frozen_block",
    "frozen_layers",
    also=FROZEN,
    num=4,
    where=is_in("encoder", "decoder", "vit", "post_norm", "residual_mlp"),
)
def _frozen_block(s: Setup, level: int) -> None:
    s.edits.append(lambda model: model.blocks[0].requires_grad_(False))
