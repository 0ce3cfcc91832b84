"""The parameters of an optimizer step, split by whether they have a gradient, and their Adam state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from sonde.probe.model import NamedParameter
from sonde.probe.optimizer.tap import OptimizerStep
from sonde.probe.outputs import is_plain_tensor
from sonde.probe.sharded import is_readable, local_of, placements_of
from sonde.reduce.optimizer_pass import Moments


@dataclass(slots=True)
class ParameterSubset:
    """Parameters of a step that have a gradient, or that have none."""

    name: str
    names: list[NamedParameter]
    params: list[Tensor]
    keys: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Site ids of these names by kind and suffix, as far as they were requested."""
    is_sharded: bool = False
    """Whether some of them are parts of tensors that several ranks hold together."""
    is_predicted: bool = False
    """Whether everything was read before the step."""

    def __iter__(self) -> Iterator[tuple[NamedParameter, Tensor]]:
        return zip(self.names, self.params, strict=True)

    @property
    def has_grads(self) -> bool:
        return self.name == _WITH

    @property
    def local_params(self) -> list[Tensor]:
        """The parameters, or their parts on this rank."""
        return [local_of(p) for p in self.params] if self.is_sharded else self.params

    @property
    def grads(self) -> list[Tensor] | None:
        """None if one is missing. Parts on this rank; empty for a gradient that is divided in another way than its
        parameter, because the two cannot be multiplied."""
        found = [grad for p in self.params if (grad := p.grad) is not None]
        if len(found) < len(self.params):
            return None
        if not self.is_sharded:
            return found
        pairs = zip(self.params, found, strict=True)
        return [local_of(grad) if _is_alike(p, grad) else local_of(p).new_empty(0) for p, grad in pairs]

    def with_plain_grads(self) -> tuple[ParameterSubset, list[Tensor]]:
        """The parameters with readable gradients, and those gradients; usually this object itself."""
        grads = [p.grad for p in self.params]
        if self.is_sharded:
            grads = [local_of(g) if _is_alike(p, g) else None for p, g in zip(self.params, grads, strict=True)]
        is_plain = [is_plain_tensor(grad) for grad in grads]
        plain: list[Any] = list(compress(grads, is_plain))
        if len(plain) == len(grads):
            return self, plain
        return ParameterSubset(
            self.name, list(compress(self.names, is_plain)), list(compress(self.params, is_plain))
        ), plain

    def other_grads(self) -> list[tuple[NamedParameter, Tensor]]:
        """Gradients that are divided in another way than their parameter."""
        if not self.is_sharded:
            return []
        return [(named, g) for named, p in self if (g := p.grad) is not None and not _is_alike(p, g)]


def _is_alike(parameter: Tensor, grad: Any) -> bool:
    """Whether a gradient is divided over the ranks like its parameter."""
    return grad is not None and bool(placements_of(parameter) == placements_of(grad))


_WITH: Final = "with"
_WITHOUT: Final = "without"
_LEAST: Final = 1e-37
"""The smallest floor: even without an epsilon, an element that never had a gradient adds nothing."""
_COUNTERS: Final = frozenset({"step", "eta", "mu", "mu_product"})
"""State of which torch's optimizers keep one number per parameter, whatever its shape."""


def split_by_grad(step: OptimizerStep, *, is_made: bool) -> list[ParameterSubset]:
    """The list of parameters with a gradient is nearly always the same; those without are kept separately. If the step
    itself computes the gradients, any parameter may have one."""
    if not step.params:
        return []
    has_grad = [not is_made or p.grad is not None for p in step.params]
    if all(has_grad):
        return [ParameterSubset(_WITH, step.names, step.params, step.keys, is_sharded=step.is_sharded)]
    has_none = [not has for has in has_grad]
    parts = [
        ParameterSubset(
            name, list(compress(step.names, which)), list(compress(step.params, which)), is_sharded=step.is_sharded
        )
        for name, which in ((_WITH, has_grad), (_WITHOUT, has_none))
    ]
    return [part for part in parts if part.params]


def is_state(name: str, value: Tensor, parameter: Tensor) -> bool:
    """Whether this is elementwise state and not a step count: both may have one element."""
    return value.numel() > 1 or (value.shape == parameter.shape and name not in _COUNTERS)


def adam_moments(optimizer: Optimizer, params: list[Tensor]) -> Moments | None:
    """Adam's state, if this optimizer keeps one."""
    states = [optimizer.state.get(p, {}) for p in params]
    if not all(is_readable(s.get("exp_avg")) and is_readable(s.get("exp_avg_sq")) for s in states):
        return None
    if any(
        s["exp_avg"].shape != p.shape or s["exp_avg_sq"].shape != p.shape for s, p in zip(states, params, strict=True)
    ):
        return None  # factored states, as in Adafactor
    groups = optimizer.param_groups
    beta2 = {id(p): group.get("betas", (0.9, 0.999))[1] for group in groups for p in group["params"]}
    eps = {id(p): float(group.get("eps") or 0.0) for group in groups for p in group["params"]}
    correction = _corrections([beta2[id(p)] for p in params], [s.get("step", 1) for s in states])
    if correction is None:
        return None
    return Moments(
        [local_of(s["exp_avg"]) for s in states],
        [local_of(s["exp_avg_sq"]) for s in states],
        correction=correction,
        floor=_floors(np.array([eps[id(p)] for p in params]), correction),
    )


def _floors(eps: NDArray[np.float64], correction: Any) -> Any:
    """For each parameter, where its corrections are stored: a step count on the device stays there."""
    if isinstance(correction, Tensor):
        squares = torch.from_numpy(eps**2).to(correction.device, non_blocking=True)
        return (squares * correction).clamp(min=_LEAST)
    return np.maximum(eps**2 * correction, _LEAST)


def _corrections(beta2: list[Any], taken: list[Any]) -> Any:
    """1 - beta2**t for each parameter: groups have their own betas, and some join later. Step counts on the device stay
    there; None if only some of them are on it."""
    on_device = [t for t in (*beta2, *taken) if isinstance(t, Tensor) and t.device.type != "cpu"]
    if not on_device:
        return 1.0 - np.array([float(beta) for beta in beta2]) ** np.array([float(count) for count in taken])
    if len(on_device) != len(taken) or any(isinstance(beta, Tensor) for beta in beta2):
        return None
    counts = torch.stack([count.reshape(()) for count in taken]).double()
    return 1.0 - torch.tensor(beta2, dtype=torch.float64).to(counts.device, non_blocking=True) ** counts
