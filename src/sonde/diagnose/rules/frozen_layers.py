"""Most weights are frozen, including the output layer: only norms and biases can learn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted
from sonde.schema.window import Window

MOST: Final = 0.5
STALLED: Final = 0.3
"""Final loss as a fraction of its start; below it, the trainable part is enough. Tuning only norms can be."""


@rule(
    causes=("underfitting", "lr_too_low", "vanishing_gradients", "bottleneck_layer", "rank_collapse"),
    references=("Jiang et al. 2025, TrainCheck (pytorch-forum-84911)",),
)
def frozen_layers(window: Window) -> Iterator[Found]:
    """Most weights have requires_grad=False, and no adapter or head learns in their place."""
    known = structure(window)
    matrices = [p for p in known.parameters if p.is_matrix]
    frozen = [p for p in matrices if not p.trainable]
    state = learned(window)
    if not frozen or state is None or not (state.has_diverged or state.left > STALLED):
        return
    if any(p.is_lora for p in known.parameters) or _has_adapters(matrices) or not _is_head_frozen(window, matrices):
        return
    if _are_biases_tuned(known.parameters, frozen):
        return
    share = sum(map(_size, frozen)) / sum(map(_size, matrices))
    if share < MOST:
        return
    owners = list(dict.fromkeys(p.owner for p in frozen))
    yield Found(
        f"{len(frozen)} of {counted(len(matrices), 'weight matrix', 'weight matrices')} "
        f"{'is' if len(frozen) == 1 else 'are'} frozen, including the output layer, and {state.outcome}.",
        step=0,
        confidence=0.9,
        remedy="\n".join(
            (
                "Unfreeze the weights:",
                *(f"`model.get_submodule({owner!r}).requires_grad_(True)`" for owner in owners[:4]),
            )
        ),
        sites=tuple(p.name for p in frozen),
        evidence=(
            Evidence("model.json", share, "0, or all but the head", meaning="fraction of frozen weights"),
            state.left_evidence(f"below {STALLED}", at_step=False),
        ),
    )


def _has_adapters(matrices: list[Parameter]) -> bool:
    """Whether narrow trainable pairs learn in place of the frozen layers."""
    trainable = [p for p in matrices if p.trainable]
    return any(min(p.shape[:2]) * 4 <= max(p.shape[:2]) for p in trainable) and len(trainable) >= 2


def _are_biases_tuned(parameters: Iterable[Parameter], frozen: list[Parameter]) -> bool:
    """Whether the biases of the frozen layers are trained: that is a method of fine-tuning, not an accident."""
    owners = {p.owner for p in frozen}
    biases = [p for p in parameters if p.owner in owners and len(p.shape) == 1]
    return bool(biases) and sum(p.trainable for p in biases) > len(biases) / 2


def _is_head_frozen(window: Window, matrices: list[Parameter]) -> bool:
    """Whether the last layer is frozen; a trained head on a frozen body is transfer learning."""
    order = {module.name: module.order for module in structure(window).modules}
    last = max(matrices, key=lambda p: order.get(p.owner, -1))
    return not last.trainable


def _size(parameter: Parameter) -> int:
    size = 1
    for length in parameter.shape:
        size *= length
    return size
