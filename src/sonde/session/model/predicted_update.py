"""Updates without a copy of the parameters: one read before the step, if the optimizer's formula is known.

Known are those of torch's Adam, AdamW and SGD, but not of classes derived from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from sonde.probe.optimizer.tap import OptimizerStep
from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.gpu.update_formula import UpdateFormula, adam_numbers, sgd_numbers
from sonde.reduce.step_pass import StepPass, Stream
from sonde.reduce.torch import Reducer, Table
from sonde.session.model.parameter_subset import ParameterSubset
from sonde.session.model.site_ids import SiteIds
from sonde.session.recording import Recording


class UpdatePrediction:
    """Predicts a step before it is made; parameters it cannot predict are handled with a copy."""

    def __init__(self, recording: Recording, reducer: Reducer, sites: SiteIds) -> None:
        self._recording, self._sites = recording, sites
        self.step_pass = StepPass(reducer)

    def before(
        self, step: OptimizerStep, part: ParameterSubset, wants: Mapping[str, bool], *, histogram: bool
    ) -> list[Table] | None:
        """The gradient tables if all of these parameters were read; otherwise None, and nothing was read."""
        params = part.params
        if not wants["update"] or step.has_closure or not params or params[0].device.type != "cuda":
            return None
        grads = [p.grad for p in params if p.grad is not None and is_plain_tensor(p.grad)]
        if len(grads) < len(params):
            return None
        rule = rule_of(step.optimizer, params, grad_scale=step.grad_scale, found_inf=step.found_inf)
        if rule is None:
            return None
        keys: dict[Stream, list[int]] = {"update": self._sites.of_part("update", part)}
        if wants["param"]:
            keys["param"] = self._sites.of_part("param", part)
        if wants["grad"]:
            keys["grad"] = self._sites.of_part("grad", part)
        if wants["optim"]:
            which: tuple[Stream, ...] = ("first", "second")
            for stream, state in zip(which, rule.states, strict=False):
                keys[stream] = self._sites.of_part("optim", part, f".{state}")
        return self.step_pass.before((step.number, part.name), keys, params, grads, rule, histogram=histogram)

    def after(self, step: OptimizerStep, name: str) -> None:
        self.step_pass.after((step.number, name))

    def tell(self) -> None:
        """Report once that a step did not match the formula; from then on a copy is kept."""
        for num, worst in self.step_pass.take_wrong().values():
            details: dict[str, Any] = {"parameters": num, "times_allowed": worst}
            message = (
                f"the optimizer updated {num} parameters differently from its formula; those updates are left out, "
                "and later ones are computed from a copy of the parameters"
            )
            self._recording.event("update_formula", message, severity="warning", details=details)


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
