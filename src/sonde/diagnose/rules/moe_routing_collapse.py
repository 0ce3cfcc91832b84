"""A router that sends nearly everything to few experts: the others get no gradient and never become worth choosing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sonde.diagnose.finding import Evidence
from sonde.diagnose.measures.model import Mixture, mixtures
from sonde.diagnose.rule import Found, rule
from sonde.schema.window import Window

IDLE: Final = 0.9
"""Share of the later steps without any gradient: nobody chose this expert."""
MOST: Final = 0.5
"""Share of the experts that must be idle."""
MIN_STEPS: Final = 20


@rule(
    severity="warning",
    needs=("grad/*/norm",),
    causes=("detached_graph", "vanishing_gradients", "frozen_layers", "optimizer_missing_params"),
    references=("Shazeer et al. 2017", "Fedus et al. 2021, Switch Transformer: load-balancing loss"),
)
def moe_routing_collapse(window: Window) -> Iterator[Found]:
    """Most experts are never chosen."""
    for mixture in mixtures(window):
        idle = _idle_since(window, mixture)
        if not idle or len(idle) < MOST * len(mixture.experts) or len(idle) == len(mixture.experts):
            continue
        since, num = max(idle.values()), len(mixture.experts)
        yield Found(
            f"{len(idle)} of the {num} experts of {mixture.site} have been given no work since step {since}: their "
            "gradients are zero or absent while those of the others are not",
            step=since,
            confidence=0.85,
            sites=list(idle),
            evidence=[
                Evidence(f"grad/{mixture.experts[next(iter(idle))][0]}/norm", 0.0, "above 0 in most steps", since),
                Evidence(f"grad/{mixture.router}/norm", len(idle) / num, "below 0.5", meaning="share of idle experts"),
            ],
            remedy=f"add a balance loss, e.g. 0.01 * {num} * (share_of_rows * mean_router_probability).sum(); start "
            f"{mixture.router} near zero with no bias; add noise to the router's logits while training",
        )


def _idle_since(window: Window, mixture: Mixture) -> dict[str, int]:
    """Experts without work over the later half of the run, and since when."""
    worked = {expert: _steps_with_work(window, names) for expert, names in mixture.experts.items()}
    all_steps = np.unique(np.concatenate([window.get(f"grad/{mixture.router}/norm")[0], *worked.values()]))
    if len(all_steps) < MIN_STEPS:
        return {}
    late = all_steps[len(all_steps) // 2 :]
    idle = {}
    for expert, steps in worked.items():
        if np.isin(late, steps).mean() <= 1 - IDLE:
            idle[expert] = int(steps[-1]) + 1 if len(steps) else int(all_steps[0])
    return idle


def _steps_with_work(window: Window, names: tuple[str, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    steps = [own[np.nan_to_num(values) > 0] for own, values in (window.get(f"grad/{name}/norm") for name in names)]
    return np.unique(np.concatenate(steps)) if steps else np.empty(0, np.int64)
