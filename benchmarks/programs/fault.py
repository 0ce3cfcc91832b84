"""A fault that is planted: what it changes, how severely, and which rules name its root cause.

`labels` are the acceptable roots (any of them is right: several repairs may work). `also` are true symptoms, which
count neither for nor against. A fault changes a `Setup` and knows no rule's threshold.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from torch import Tensor, nn

from programs.models import Architecture
from programs.setup import Setup
from programs.tasks import Data, Task

BROKEN: Final = (
    *(
        "loss_oscillation",
        "exploding_gradients",
        "dead_relu",
        "nan_inf",
        "loss_spikes",
        "underfitting",
        "loss_divergence",
    ),
    *(
        "saturated_activations",
        "constant_output",
        "output_logit_growth",
        "attention_logit_growth",
        "vanishing_gradients",
    ),
    *("attention_entropy_collapse", "rank_collapse", "loss_plateau", "adam_second_moment_underestimate"),
)
SLOW: Final = ("underfitting", "loss_plateau", "constant_output", "vanishing_gradients", "bottleneck_layer")
Where = Callable[[Architecture, Task], bool]


@dataclass(frozen=True)
class Fault:
    """A fault: its name, its change, where it can be planted, and what to call it."""

    name: str
    plant: Callable[[Setup, int], object]
    """Changes a healthy setup; the severity is 0, 1 or 2."""
    labels: frozenset[str]
    also: frozenset[str]
    where: Where
    num: int
    """How many programs have it."""
    optimizers: tuple[str, ...]
    style: str = ""
    """The only style in which it is meant to be found; empty for any."""
    outcome: str = "score"
    """What shows that it did harm: "score" (it learns worse than its twin), "gain" (its score is better than honest),
    "memory" (what the loop keeps alive), "always" (harm that no score shows, such as wasted parameters)."""
    twin: Callable[[Setup, int], object] | None = None
    """A change that the repaired twin has too."""


FAULTS: Final[dict[str, Fault]] = {}


def fault(
    name: str, labels: str = "", *, also: tuple[str, ...] = SLOW, where: Where | None = None, num: int = 5,
    optimizers: tuple[str, ...] = (), **options: Any,
) -> Callable[[Callable[[Setup, int], object]], Fault]:  # fmt: skip
    """Register a fault. Without labels, its name is its label."""

    def register(plant: Callable[[Setup, int], object]) -> Fault:
        assert name not in FAULTS, f"two faults named {name}"
        roots = frozenset((labels or name).split())
        FAULTS[name] = Fault(
            name, plant, roots, frozenset(also) - roots, where or (lambda _a, _t: True), num, optimizers, **options
        )
        return FAULTS[name]

    return register


def is_in(*names: str) -> Where:
    return lambda a, _t: a.name in names


def of_task(*names: str) -> Where:
    return lambda _a, t: t.name in names


def turns(option: str, *tasks: str) -> Where:
    return lambda a, t: option in a.options and (not tasks or t.name in tasks)


def is_numeric(a: Architecture, t: Task) -> bool:
    return t.inputs in ("vector", "image", "series")


def is_labelled(a: Architecture, t: Task) -> bool:
    return t.name not in ("reconstruction", "generation", "contrastive", "policy")


def is_not_lora(a: Architecture, t: Task) -> bool:
    return not a.name.startswith("lora")


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]


def inputs(s: Setup, change: Callable[[Tensor], Tensor]) -> None:
    d = s.data
    s.data = Data(change(d.x), d.y, change(d.x_val), d.y_val)


@cache
def all_faults() -> Mapping[str, Fault]:
    """Every fault, by name."""
    package = importlib.import_module("programs.faults")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"programs.faults.{module}")
    return FAULTS
