"""A router sends nearly everything to a few experts: the others get no gradient and never improve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Mixture, mixtures
from sonde.diagnose.rule import Found, rule
from sonde.diagnose.wording import since
from sonde.schema.window import Window

IDLE: Final = 0.98
"""Fraction of the later steps without a gradient, in which the router did not choose the expert. An expert of a healthy
top-1 mixture may rest for most steps of a small batch, but is chosen again and again."""
MOST: Final = 0.5
"""Minimum fraction of idle experts."""
MIN_STEPS: Final = 20


@rule(
    severity="warning",
    needs=("grad/*/norm",),
    causes=("detached_graph", "vanishing_gradients", "frozen_layers", "optimizer_missing_params"),
    references=("Shazeer et al. 2017", "Fedus et al. 2021, Switch Transformer: load-balancing loss"),
)
def moe_routing_collapse(window: Window) -> Iterator[Found]:
    """The router never chooses most of the experts."""
    for mixture in mixtures(window):
        idle = _idle_since(window, mixture)
        if not idle or len(idle) < MOST * len(mixture.experts) or len(idle) == len(mixture.experts):
            continue
        step, num = max(idle.values()), len(mixture.experts)
        yield Found(
            f"{len(idle)} of the {num} experts of {mixture.site} have been idle {since(step)}: their "
            "gradients are zero or missing, while the other experts have gradients.",
            step=step,
            confidence=0.85,
            sites=list(idle),
            evidence=[
                Evidence(
                    f"grad/{mixture.experts[next(iter(idle))][0]}/norm",
                    0.0,
                    "above 0 in most steps",
                    step,
                    "gradient norm of an idle expert",
                ),
                Evidence(
                    f"grad/{mixture.router}/norm", len(idle) / num, "below 0.5", meaning="fraction of idle experts"
                ),
            ],
            remedy="Add a load-balancing loss, for example "
            f"`0.01 * {num} * (token_fraction * mean_router_probability).sum()`. Initialise {mixture.router} near zero "
            "and without a bias, and add noise to the router's logits during training.",
        )


def _idle_since(window: Window, mixture: Mixture) -> dict[str, int]:
    """Experts that were idle in the second half of the run, with the step since which they have been."""
    worked = {expert: _steps_with_work(window, names) for expert, names in mixture.experts.items()}
    all_steps = np.unique(np.concatenate([window.get(f"grad/{mixture.router}/norm")[0], *worked.values()]))
    if len(all_steps) < MIN_STEPS:
        return {}
    late = all_steps[len(all_steps) // 2 :]
    idle = {}
    for expert, steps in worked.items():
        is_recent = len(steps) > 0 and steps[-1] >= late[len(late) // 2]
        if np.isin(late, steps).mean() <= 1 - IDLE and not is_recent:
            idle[expert] = int(steps[-1]) + 1 if len(steps) else int(all_steps[0])
    return idle


def _steps_with_work(window: Window, names: tuple[str, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    steps = [own[np.nan_to_num(values) > 0] for own, values in (window.get(f"grad/{name}/norm") for name in names)]
    return np.unique(np.concatenate(steps)) if steps else np.empty(0, np.int64)
