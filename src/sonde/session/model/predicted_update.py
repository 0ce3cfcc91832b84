"""Updates without a copy of the parameters: one read before the step, if the optimizer's formula is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sonde.probe.optimizer.tap import OptimizerStep
from sonde.probe.outputs import is_plain_tensor
from sonde.reduce.step_pass import StepPass, Stream
from sonde.reduce.torch import Reducer, Table
from sonde.session.model.formula import rule_of
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
