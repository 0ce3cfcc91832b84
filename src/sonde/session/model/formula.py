"""Optimizers with a known update formula: torch's Adam, AdamW and SGD, but not classes derived from them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.gpu.update_formula import UpdateFormula, adam_numbers, sgd_numbers

_HALF: Final = (torch.bfloat16, torch.float16)


def rule_of(
    optimizer: Optimizer, params: list[Tensor], *, grad_scale: Any = None, found_inf: Any = None
) -> UpdateFormula | None:
    """The formula by which this optimizer is about to update these parameters; None if it is not known."""
    kind = type(optimizer)
    if kind not in (Adam, AdamW, SGD) or not all(_is_known(group) for group in optimizer.param_groups):
        return None
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    mine = [groups.get(id(p)) for p in params]
    if not all(g is not None and _is_exact(p, g) for p, g in zip(params, mine, strict=True)):
        return None
    states = [optimizer.state.get(p, {}) for p in params]
    rule = _sgd(params, mine, states) if kind is SGD else _adam(kind, params, mine, states)
    if rule is not None:
        rule.grad_scale, rule.found_inf = grad_scale, found_inf
    return rule


def _is_exact(param: Tensor, group: dict[str, Any]) -> bool:
    """Without fused=True a half-precision step is rounded after each of its operations."""
    return param.dtype == torch.float32 or (param.dtype in _HALF and bool(group.get("fused")))


def _is_known(group: dict[str, Any]) -> bool:
    numbers = [group.get("lr"), *group.get("betas", ())]
    on_device = any(isinstance(n, Tensor) and n.device.type != "cpu" for n in numbers)
    return not (on_device or group.get("amsgrad") or group.get("differentiable"))


def _adam(kind: type[Optimizer], params: list[Tensor], groups: list[Any], states: list[Any]) -> UpdateFormula | None:
    first, second = [s.get("exp_avg") for s in states], [s.get("exp_avg_sq") for s in states]
    if not _fit(params, first) or not _fit(params, second):
        return None
    taken = [s.get("step", 0.0) for s in states]
    counted = [t for t in taken if isinstance(t, Tensor) and t.device.type == "cuda"]
    if counted and (len(counted) < len(taken) or any(t.dtype != torch.float32 for t in counted)):
        return None  # some have stepped and some have not
    rows: dict[tuple[int, float], list[float]] = {}  # a group usually shares one value
    numbers = []
    for group, count in zip(groups, taken, strict=True):
        key = id(group), 0.0 if counted else float(count)
        if key not in rows:
            decoupled = kind is AdamW or bool(group.get("decoupled_weight_decay"))
            rows[key] = adam_numbers(group, key[1], decoupled=decoupled)
        numbers.append(rows[key])
    return UpdateFormula("adam", numbers, first, second, taken=counted or None, states=("exp_avg", "exp_avg_sq"))


def _sgd(params: list[Tensor], groups: list[Any], states: list[Any]) -> UpdateFormula | None:
    buffers = [s.get("momentum_buffer") for s in states]
    if not _fit(params, buffers):
        return None
    numbers = [sgd_numbers(group, has_buffer=b is not None) for group, b in zip(groups, buffers, strict=True)]
    has_momentum = [bool(group["momentum"]) for group in groups]
    if any(has_momentum) and not all(has_momentum):
        return None  # some have a state to record, and some have none
    return UpdateFormula(
        "sgd", numbers, buffers, [None] * len(params), states=("momentum_buffer",) if all(has_momentum) else ()
    )


def _fit(params: list[Tensor], states: list[Any]) -> bool:
    return all(s is None or (is_plain_tensor(s) and s.shape == p.shape) for p, s in zip(params, states, strict=True))
