"""Adapters that never move: both factors are zero, so that each one's gradient is too; or they get none at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Adapter, adapters, structure
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

MIN_STEPS: Final = 3
"""B = 0 is how adapters begin: A has no gradient in the first step, and only there."""
MIN_WITHOUT: Final = 20
"""Steps in which others had gradients: an expert may wait a while for its turn."""


@rule(
    severity="critical",
    needs=("grad/*/norm", "param/*/norm"),
    causes=(
        "vanishing_gradients", "symmetric_init", "lr_too_low", "underfitting", "frozen_layers", "detached_graph",
        "init_scale", "lora_rank_too_low", "constant_output", "dead_relu",
        "rank_collapse",
    ),
    references=("Hu et al. 2021, LoRA",),
)  # fmt: skip
def lora_zero_init(window: Window) -> Iterator[Found]:
    """Adapters that never move: zero at the start on both sides, or without a gradient at all."""
    known = adapters(window)
    dead = [adapter for adapter in known if _is_dead(window, adapter)]
    if dead:
        yield _both_zero(window, dead, len(known))
    num_steps = max((_num_gradients(window, adapter) for adapter in known), default=0)
    idle = [adapter for adapter in known if _is_tuned(window, adapter) and not _num_gradients(window, adapter)]
    if idle and num_steps >= MIN_WITHOUT:
        yield _without_gradient(idle, len(known), num_steps)


def _both_zero(window: Window, dead: list[Adapter], num_all: int) -> Found:
    first = dead[0]
    step = int(window.get(f"grad/{first.a}/norm")[0][0])
    return Found(
        f"{len(dead)} of {num_all} adapters are dead, {first.module} first: A and B are both zero, "
        f"so neither has had a gradient since step {step}",
        step=step,
        confidence=0.95,
        sites=[name for adapter in dead for name in (adapter.a, adapter.b)],
        evidence=[
            Evidence(f"param/{first.a}/norm", 0.0, "above 0", step),
            Evidence(f"grad/{first.b}/norm", 0.0, "above 0 from the first step on", step),
        ],
        remedy=f"leave B at zero and start A at random: nn.init.kaiming_uniform_(model.get_parameter({first.a!r}), "
        "a=5 ** 0.5)",
    )


def _without_gradient(idle: list[Adapter], num_all: int, num_steps: int) -> Found:
    first = idle[0]
    return Found(
        f"{len(idle)} of {num_all} adapters are dead, {first.module} first: in {num_steps} steps no gradient has "
        "reached them, while others learned",
        step=0,
        confidence=0.9,
        severity="warning",
        sites=[name for adapter in idle for name in (adapter.a, adapter.b)],
        evidence=[Evidence(f"grad/{first.b}/norm", 0.0, "there at every step", meaning="gradients seen")],
        remedy=f"see whether {first.module} takes part in the forward pass; if it need not, leave it out of "
        "target_modules",
    )


def _num_gradients(window: Window, adapter: Adapter) -> int:
    return max(len(window.get(f"grad/{name}/norm")[0]) for name in (adapter.a, adapter.b))


def _is_tuned(window: Window, adapter: Adapter) -> bool:
    """Gradients are recorded of what is in an optimizer and was chosen: then its weights are there."""
    tuned = {parameter.name for parameter in structure(window).parameters if parameter.in_optimizer}
    return all(name in tuned and len(window.get(f"param/{name}/norm")[0]) for name in (adapter.a, adapter.b))


def _is_dead(window: Window, adapter: Adapter) -> bool:
    for name in (adapter.a, adapter.b):
        gradient, weight = window.get(f"grad/{name}/norm")[1], window.get(f"param/{name}/norm")[1]
        if len(gradient) < MIN_STEPS or not len(weight):
            return False
        if not np.all(gradient == 0) or not np.all(weight == 0):
            return False
    return True
