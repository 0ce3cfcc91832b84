"""Adapters never change: both factors are zero, so both gradients are zero too, or no gradient reaches them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Adapter, adapters, structure
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import counted, listed, since
from sonde.schema.window import Window

MIN_STEPS: Final = 3
"""Adapters start with B = 0, so A has no gradient in the first step, but only there."""
MIN_WITHOUT: Final = 20
"""Number of steps in which other adapters had gradients; an expert may not be chosen for a while."""


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
    """Adapters never change: both factors start at zero, or no gradient reaches them."""
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
        f"{_count(dead, num_all)}: A and B are both zero, so neither has had a gradient {since(step)}.",
        step=step,
        confidence=0.95,
        sites=[name for adapter in dead for name in (adapter.a, adapter.b)],
        evidence=[
            Evidence(f"param/{first.a}/norm", 0.0, "above 0", step, "norm of A"),
            Evidence(f"grad/{first.b}/norm", 0.0, "above 0 from the first step", step, "gradient norm of B"),
        ],
        remedy="Leave B at zero and initialise A at random: "
        f"`nn.init.kaiming_uniform_(model.get_parameter({first.a!r}), a=5 ** 0.5)`.",
    )


def _without_gradient(idle: list[Adapter], num_all: int, num_steps: int) -> Found:
    first = idle[0]
    return Found(
        f"{_count(idle, num_all)}: in {num_steps:,} steps no gradient has reached "
        f"{'it' if len(idle) == 1 else 'them'}, while others learned.",
        step=0,
        confidence=0.9,
        severity="warning",
        sites=[name for adapter in idle for name in (adapter.a, adapter.b)],
        evidence=[Evidence(f"grad/{first.b}/norm", 0.0, "one per step", meaning="number of gradients")],
        remedy=f"Check that {first.module} takes part in the forward pass. If it is not needed, remove it from "
        "`target_modules`.",
    )


def _count(dead: list[Adapter], num_all: int) -> str:
    names = listed([adapter.module for adapter in dead])
    return f"{len(dead)} of {counted(num_all, 'adapter')} {'is' if len(dead) == 1 else 'are'} dead ({names})"


def _num_gradients(window: Window, adapter: Adapter) -> int:
    return max(len(window.get(f"grad/{name}/norm")[0]) for name in (adapter.a, adapter.b))


def _is_tuned(window: Window, adapter: Adapter) -> bool:
    """Whether both weights are in an optimizer and recorded; only then are their gradients recorded."""
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
