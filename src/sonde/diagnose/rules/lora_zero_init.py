"""Adapters whose both factors are zero: each one's gradient is a multiple of the other, so neither ever moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.adapters import Adapter, adapters
from sonde.diagnose.finding import Evidence, Finding
from sonde.diagnose.rule import found, rule
from sonde.schema.window import Window

MIN_STEPS: Final = 3
"""B = 0 is how adapters begin: A has no gradient in the first step, and only there."""


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
def lora_zero_init(window: Window) -> Iterator[Finding]:
    """Adapters that were zero at the start on both sides get no gradient, ever."""
    dead = [adapter for adapter in adapters(window) if _is_dead(window, adapter)]
    if not dead:
        return
    first = dead[0]
    step = int(window.get(f"grad/{first.a}/norm")[0][0])
    yield found(
        window,
        "lora_zero_init",
        f"{len(dead)} of {len(adapters(window))} adapters are dead, {first.module} first: A and B are both zero, "
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


def _is_dead(window: Window, adapter: Adapter) -> bool:
    for name in (adapter.a, adapter.b):
        gradient, weight = window.get(f"grad/{name}/norm")[1], window.get(f"param/{name}/norm")[1]
        if len(gradient) < MIN_STEPS or not len(weight):
            return False
        if not np.all(gradient == 0) or not np.all(weight == 0):
            return False
    return True
