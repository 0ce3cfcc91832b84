"""Weights that do not train although nothing suggests that this is meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.freshness import looks_fresh
from sonde.diagnose.measures.loss import learned
from sonde.diagnose.measures.model import Parameter, Structure, adapters, structure
from sonde.diagnose.measures.rate import rate
from sonde.diagnose.measures.readings import reading
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, listed
from sonde.schema.window import Window

MOST: Final = 0.5
"""Fraction of the weights of the model. Freezing more, with the head, leaves norms and biases to learn."""
STALLED: Final = 0.3
"""Final loss as a fraction of its start; below it, the trainable part is enough. Tuning only norms can be."""
FRESH: Final = 0.75
"""Fraction of the frozen weights that must look freshly initialised; a trained one does so by chance only."""
MIN_STEPS: Final = 20
ALIKE: Final = 0.05
"""Relative difference between output and bias: the bias is recorded before the step or after it."""
NARROW: Final = 4
"""Width divided by rank from which a trainable matrix may be half of an adapter."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Weights that do not train, and why."""

    weights: tuple[Parameter, ...]
    why: str
    remedy: str


@rule(
    needs=("update/*/norm", "grad/*/norm"),
    causes=(
        *("underfitting", "lr_too_low", "vanishing_gradients", "bottleneck_layer", "rank_collapse", "loss_plateau"),
        *("rnn_vanishing_temporal", "adam_epsilon_dominates", "constant_output", "label_shuffling"),
    ),
    references=("Jiang et al. 2025, TrainCheck (pytorch-forum-84911)",),
)
def frozen_layers(window: Window) -> Iterator[Found]:
    """Weights never change: they are frozen, have a learning rate of 0, or never get a gradient."""
    known = structure(window)
    order = {module.name: module.order for module in known.modules}
    ran = _in_order(known, [p for p in known.parameters if p.is_matrix and order.get(p.owner, -1) >= 0])
    for idle in (_frozen(ran), _without_rate(window, ran), _without_gradient(window, known, ran)):
        moving = [p for p in ran if p not in idle.weights and p.trainable and p.in_optimizer]
        if idle.weights and (moving or idle.why == FROZEN):
            yield _found(window, known, idle, ran, moving)


FROZEN: Final = "requires_grad=False"


def _frozen(ran: list[Parameter]) -> Idle:
    frozen = tuple(p for p in ran if not p.trainable)
    owners = list(dict.fromkeys(p.owner for p in frozen))[:4]
    lines = (f"`model.get_submodule({owner!r}).requires_grad_(True)`" for owner in owners)
    return Idle(frozen, FROZEN, "\n".join(("Unfreeze the weights before you build the optimizer:", *lines)))


def _without_rate(window: Window, ran: list[Parameter]) -> Idle:
    """Weights whose group has a learning rate of 0, while that of another group is positive."""
    rates = {p.name: rate(window, p)[1] for p in ran if p.trainable and p.in_optimizer and p.group >= 0}
    still = {name for name, values in rates.items() if len(values) >= MIN_STEPS and not np.nan_to_num(values).any()}
    weights = tuple(p for p in ran if p.name in still) if len(still) < len(rates) else ()
    return Idle(
        weights,
        "their parameter group has a learning rate of 0",
        "Give this group a learning rate, or remove its `lr`.",
    )


def _without_gradient(window: Window, known: Structure, ran: list[Parameter]) -> Idle:
    """Weights whose gradient is always exactly 0 although their own bias, and a layer before them, have one."""
    biases = {p.owner: p for p in known.parameters if len(p.shape) == 1 and p.name.endswith("bias") and not p.is_norm}
    weights = tuple(
        p
        for p in ran
        if p.trainable
        and p.in_optimizer
        and p.owner in biases
        and _is_zero(window, p) is True
        and _is_zero(window, biases[p.owner]) is False
    )
    # With a dead or constant layer before it, a weight has no gradient either: its input is 0.
    alive = [
        p
        for p in weights
        if (p == ran[0] or not _is_silent(window, ran, p)) and not _is_fed_zeros(window, p, biases[p.owner])
    ]
    return Idle(
        tuple(alive),
        "their gradient is exactly 0 at every step although their bias has one",
        "Look for code that clears or masks gradients: a hook, `weight.grad = None`, or `weight.grad.zero_()`.",
    )


def _is_zero(window: Window, parameter: Parameter) -> bool | None:
    values = window.get(f"grad/{parameter.name}/norm")[1]
    return not np.nan_to_num(values).any() if len(values) >= MIN_STEPS else None


def _is_fed_zeros(window: Window, weight: Parameter, bias: Parameter) -> bool:
    """Whether the layer's output is its bias: its input is 0, as in the first decoder layer of DETR."""
    steps, output = window.get(f"act/{weight.owner}/rms")
    own, values = window.get(f"param/{bias.name}/rms")
    _, mine, theirs = np.intersect1d(steps, own, return_indices=True)
    return len(mine) > 0 and np.allclose(output[mine], values[theirs], rtol=ALIKE, atol=0)


def _is_silent(window: Window, ran: list[Parameter], parameter: Parameter) -> bool:
    """Whether the layer before a weight is dead: it has no gradient at all."""
    owner = ran[ran.index(parameter) - 1].owner
    before = [p for p in structure(window).parameters if p.owner == owner]
    return all(_is_zero(window, p) is not False for p in before)


def _found(window: Window, known: Structure, idle: Idle, ran: list[Parameter], moving: list[Parameter]) -> Found:
    state = learned(window)
    fresh = [p for p in idle.weights if looks_fresh(window, p)]
    is_stalled = state is not None and (state.has_diverged or state.left > STALLED)
    reason, confidence = "", 0.9
    if adapters(window) or _is_adapted(known, ran) or _is_teacher(known, idle.weights):
        pass
    elif len(fresh) >= FRESH * len(idle.weights) and not (_are_features(idle, ran) and not is_stalled):
        reason = f"although {'it looks' if len(idle.weights) == 1 else 'they look'} freshly initialised"
    elif idle.why != FROZEN:
        reason = "while the other layers train"
    elif is_stalled and _is_head_frozen(ran) and not _are_biases_tuned(known.parameters, idle.weights):
        reason = f"including the output layer, and {state.outcome}" if _share(idle, ran) >= MOST and state else ""
    if not reason and _is_surrounded(known, idle, moving):
        reason, confidence = "while all layers around them train", 0.6
    names = listed(list(dict.fromkeys(p.owner for p in idle.weights)), "layer")
    verb = "does" if len(idle.weights) == 1 else "do"
    clause = f", {reason}" if reason else ""
    return Found(
        f"{len(idle.weights)} of {counted(len(ran), 'weight matrix', 'weight matrices')} ({names}) {verb} not train "
        f"({idle.why}){clause}.",
        step=0,
        confidence=confidence,
        severity=None if reason else "info",
        sites=tuple(p.name for p in idle.weights),
        evidence=_evidence(window, idle, fresh, ran),
        remedy=idle.remedy if reason else f"If this is not meant: {idle.remedy[0].lower()}{idle.remedy[1:]}",
    )


def _are_features(idle: Idle, ran: list[Parameter]) -> bool:
    """Whether all layers before the first trained one are frozen, several of them: random features under a head."""
    first = [p for p in ran[: len(idle.weights)] if p in idle.weights]
    return idle.why == FROZEN and len(first) == len(idle.weights) > 1


def _evidence(window: Window, idle: Idle, fresh: list[Parameter], ran: list[Parameter]) -> list[Evidence]:
    first = idle.weights[0].name
    found = [
        Evidence("model.json", float(len(idle.weights)), "0", meaning=f"weight matrices of {len(ran)} not trained")
    ]
    if fresh:
        found.append(reading(window, f"unit/{fresh[0].name}/frozen_rms", 0, "", "as initialised for its shape"))
    if len(window.get(f"update/{first}/norm")[1]):
        found.insert(0, reading(window, f"update/{first}/norm", window.last_step, "", "update norm"))
    return found


def _share(idle: Idle, ran: list[Parameter]) -> float:
    return sum(map(_size, idle.weights)) / sum(map(_size, ran))


def _is_adapted(known: Structure, ran: list[Parameter]) -> bool:
    """Whether adapters learn in place of the frozen layers: named ones, or pairs that narrow and widen again."""
    trained = [p.shape[:2] for p in ran if p.trainable]
    pairs = pairwise(trained)
    return any(p.is_lora for p in known.parameters) or any(
        down == up[::-1] and down[0] * NARROW <= down[1] for down, up in pairs
    )


def _is_teacher(known: Structure, weights: Iterable[Parameter]) -> bool:
    """Whether the frozen weights are those of a module that has a trained twin, as a teacher or target network has."""
    tops = {p.name.partition(".")[0] for p in weights}
    if len(tops) != 1:
        return False
    makes: dict[str, list[tuple[int, ...]]] = {}
    trained: set[str] = set()
    for p in known.parameters:
        top = p.name.partition(".")[0]
        makes.setdefault(top, []).append(p.shape)
        if p.trainable:
            trained.add(top)
    (own,) = tops
    return own not in trained and len(makes[own]) > 2 and any(makes[other] == makes[own] for other in trained)


def _are_biases_tuned(parameters: Iterable[Parameter], frozen: Iterable[Parameter]) -> bool:
    """Whether the biases of the frozen layers are trained: that is a method of fine-tuning, not an accident."""
    owners = {p.owner for p in frozen}
    biases = [p for p in parameters if p.owner in owners and len(p.shape) == 1]
    return bool(biases) and sum(p.trainable for p in biases) > len(biases) / 2


def _is_head_frozen(ran: list[Parameter]) -> bool:
    """Whether the last layer is frozen; a trained head on a frozen body is transfer learning."""
    return not ran[-1].trainable


def _is_surrounded(known: Structure, idle: Idle, moving: list[Parameter]) -> bool:
    """Whether a minority of the layers is idle, with trained ones before and after: fine-tuning freezes the first."""
    if not moving or len(idle.weights) > len(moving):
        return False
    place = {module.name: module.order for module in known.modules}
    first, last = min(place[p.owner] for p in moving), max(place[p.owner] for p in moving)
    return all(first < place[p.owner] < last for p in idle.weights)


def _in_order(known: Structure, parameters: list[Parameter]) -> list[Parameter]:
    order = {module.name: module.order for module in known.modules}
    return sorted(parameters, key=lambda p: order.get(p.owner, -1))


def _size(parameter: Parameter) -> int:
    return int(np.prod(parameter.shape))
