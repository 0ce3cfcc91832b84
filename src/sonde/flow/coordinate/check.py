"""The refined coordinate check (Haas et al. 2025, arXiv 2505.22491): how much of a layer's change comes from its own
weights.

For a layer with weights W the change of its output since initialisation splits into

    y_t - y_0  =  (W_t - W_0) x_t  +  W_0 (x_t - x_0)  +  (b_t - b_0)
                  effective           propagating         bias

In a parametrisation that transfers over widths (muP) both stay of the same size as the model gets wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from sonde.errors import UsageError
from sonde.flow.batch import call
from sonde.flow.monitor.monitor import ModuleMonitor
from sonde.probe.preserve import preserved
from sonde.schema.names import strip_wrappers

WEIGHTED: Final = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.Bilinear)
WEIGHTED_BY_NAME: Final = ("Conv1D",)
"""Linear layers of other libraries that are not an `nn.Linear`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinate:
    """Root mean squares of one layer's parts."""

    name: str
    type: str
    effective: float
    """(W_t - W_0) x_t, without the change of the bias"""
    propagating: float
    """W_0 (x_t - x_0)"""
    bias: float
    """b_t - b_0"""
    total: float
    """The whole change of the output: the sum of these three parts."""
    output: float
    """The output at initialisation."""
    input: float
    """x_t"""
    input_change: float
    """x_t - x_0"""


def refined_coordinate_check(model: nn.Module, reference: nn.Module, x: Any) -> list[Coordinate]:
    """Split each layer's change since `reference` (a copy made at initialisation) on one batch. Both models are left
    unchanged.

    reference = copy.deepcopy(model)
    train(model)
    refined_coordinate_check(model, reference, x)
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_slow_path())
        for each in (model, reference):
            stack.enter_context(preserved(each, training=False))
        now, then = _calls(model, x), _calls(reference, x)
        before, after = (
            {strip_wrappers(name): module for name, module in each.named_modules()} for each in (reference, model)
        )
        found = []
        for name, calls in now.items():
            if name not in then or len(then[name]) != len(calls):
                raise UsageError(f"the two models differ: one of them called {name} {len(calls)} times.")
            layer = name.removesuffix(IN_PROJ)
            parts = [split(before[layer], after[layer], a, b) for a, b in zip(calls, then[name], strict=True)]
            found.append(_coordinate(name, type(before[layer]).__name__, parts))
    return found


@contextmanager
def _slow_path() -> Iterator[None]:
    """torch's fused encoder layer bypasses its own modules, and their hooks."""
    was = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


def is_weighted(module: nn.Module) -> bool:
    return isinstance(module, WEIGHTED) or type(module).__name__ in WEIGHTED_BY_NAME


IN_PROJ: Final = ".in_proj"
"""The joint projection of `nn.MultiheadAttention` to queries, keys and values, which is not a module."""
_Call = tuple[tuple[Tensor, ...], Tensor]


def _calls(model: nn.Module, x: Any) -> dict[str, list[_Call]]:
    """Input and output of every weighted module."""
    seen: dict[str, list[_Call]] = {}
    names = {id(module): strip_wrappers(name) for name, module in model.named_modules()}

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        name = names.get(id(module))
        if name is None or not args:
            return
        given = tuple(a.detach().clone() for a in args if isinstance(a, Tensor))
        if is_weighted(module) and isinstance(output, Tensor):
            seen.setdefault(name, []).append((given, output.detach().clone()))
        elif isinstance(module, nn.MultiheadAttention) and module._qkv_same_embed_dim:
            seen.setdefault(name + IN_PROJ, []).append((given[:1], _applied(module, given[:1])))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        call(model, x)
    finally:
        handle.remove()
    return seen


def _applied(module: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    """A layer's output, without calling anyone's hooks."""
    if isinstance(module, nn.MultiheadAttention):
        assert module.in_proj_weight is not None
        return nn.functional.linear(given[0], module.in_proj_weight, module.in_proj_bias)
    output: Tensor = type(module).forward(module, *given)
    return output


def split(before: nn.Module, after: nn.Module, now: _Call, then: _Call) -> dict[str, Tensor]:
    """The parts as tensors, from one more pass of the old layer over the new input."""
    (given_now, y_now), (given_then, y_then) = now, then
    mixed = _applied(before, given_now)
    bias = _bias_change(before, after)
    x_now, x_then = given_now[0], given_then[0]
    same_kind = x_now.is_floating_point()
    return {
        "effective": y_now - mixed - bias.to(y_now),
        "propagating": mixed - y_then,
        "bias": bias,
        "total": y_now - y_then,
        "output": y_then,
        "input": x_now if same_kind else torch.zeros(1),
        "input_change": x_now - x_then if same_kind else torch.zeros(1),
    }


def _bias_change(before: nn.Module, after: nn.Module) -> Tensor:
    """b_t - b_0, in a shape that can be subtracted from the output."""
    name = "in_proj_bias" if isinstance(before, nn.MultiheadAttention) else "bias"
    old, new = getattr(before, name, None), getattr(after, name, None)
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return torch.zeros(1)
    num_after_channels = len(before.kernel_size) if isinstance(before, nn.modules.conv._ConvNd) else 0
    return (new - old).detach().reshape(-1, *(1,) * num_after_channels)


def _coordinate(name: str, type_name: str, parts: list[dict[str, Tensor]]) -> Coordinate:
    rms = {key: math.sqrt(np.mean([float(p[key].double().square().mean()) for p in parts])) for key in parts[0]}
    return Coordinate(name=name, type=type_name, **rms)


class RefinedCoordinateCheck:
    """The same inside a training loop, on the activations that a monitor with a reference saw in this step."""

    def __init__(self, monitor: ModuleMonitor) -> None:
        if monitor.reference is None:
            raise UsageError("the coordinate check needs a reference:  monitor.set_reference_module(reference)")
        self.monitor = monitor
        monitor.keeps_calls = True

    def refined_coordinate_check(self) -> None:
        """Log the parts of every weighted layer; call it after the forward passes of both models, before the optimizer
        steps."""
        monitor = self.monitor
        if not monitor.is_monitoring or monitor.reference is None:
            return
        with torch.no_grad(), monitor.no_monitor():
            found = list(self._parts(monitor.reference))
        for name, parts in found:
            for title, key in _TITLES.items():
                part = parts[key].float()
                rows = part.reshape(1, -1) if key == "bias" else part.flatten(1)
                monitor.log_tensor(f"RCC {title}/{name}/l2norm", rows.norm(dim=-1))

    def _parts(self, reference: nn.Module) -> Iterator[tuple[str, dict[str, Tensor]]]:
        monitor = self.monitor
        before, after = (
            {monitor.format_name(name): module for name, module in each.named_modules()}
            for each in (reference, monitor.required_module)
        )
        for name, calls in monitor.calls.items():
            others = monitor.reference_calls.get(name, [])
            if name not in before or not is_weighted(before[name]):
                continue
            for now, then in zip(calls, others, strict=False):
                if now.inputs and then.inputs and "" in now.outputs:
                    was, was_then = (now.inputs, now.outputs[""]), (then.inputs, then.outputs[""])
                    yield name, split(before[name], after[name], was, was_then)


_TITLES: Final = {
    "(W_t-W_0)x_t": "effective",
    "W_0(x_t-x_0)": "propagating",
    "b_t-b_0": "bias",
    "x_t": "input",
    "(x_t-x_0)": "input_change",
}
