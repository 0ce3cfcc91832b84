"""The scalars of a model's optimizers: their hyperparameters, the loss scale, what clipping saw, and skipped steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import Optimizer

from sonde.probe.optimizer.hyperparameters import RATE, Hyperparameters, group_numbers
from sonde.probe.optimizer.tap import OptimizerStep, OptimizerTap
from sonde.reduce.scalars import PendingScalars
from sonde.schema.records import Event
from sonde.session.model.optimizer_names import OptimizerNames

if TYPE_CHECKING:
    from sonde.session.model.watched import WatchedModel

MAX_CLIPS: Final = 8
"""Parts of the parameters that are clipped by themselves: beyond that only `clip_factor` tells of each."""


class OptimizerScalars:
    """Of one watched model. All models of a session share the names."""

    def __init__(self, watching: WatchedModel, tap: OptimizerTap) -> None:
        self._watching, self._session, self._tap = watching, watching.session, tap
        others = [other.optimizer_scalars.names for other in self._session.watched_models]
        self.names: OptimizerNames = others[0] if others else OptimizerNames()
        self.names.expect(watching.names, tap.watched)
        self._known: dict[int, Hyperparameters] = {}

    def log(self, step: OptimizerStep) -> None:
        """What the optimizer is told."""
        if not self._is_reported(step):
            return
        place = self.place(step)
        values = {f"{place}/lr": step.lr, f"{place}/loss_scale": step.loss_scale}
        self._watching.log({name: value for name, value in values.items() if value is not None})
        if self._watching.is_recording:
            self._log_groups(step, place)
        if step.found_inf is not None:
            self._watch_for_skip(step.found_inf)

    def clipped(self, step: OptimizerStep) -> dict[str, Any]:
        """The total norm and the limit of `clip_grad_norm_`. Where parts of the parameters were clipped by themselves,
        of each, in the order of the optimizer's parameters."""
        values: dict[str, Any] = {}
        if not self._is_reported(step):
            return values
        for number, (norm, limit) in enumerate(step.clips.norms[:MAX_CLIPS]):
            place = f"{self.place(step)}/clip.{number}" if number else self.place(step)
            values[f"{place}/grad_norm"], values[f"{place}/max_norm"] = norm, limit
        return values

    def place(self, step: OptimizerStep) -> str:
        """What the names of its scalars begin with."""
        return self.names.of(self._watching.names, step.number, step.optimizer)

    def _is_reported(self, step: OptimizerStep) -> bool:
        """Whether to report it here: the numbers of an optimizer that trains several models come with the first."""
        taps = (watching.optimizers for watching in self._session.watched_models)
        first = next((tap for tap in taps if any(one is step.optimizer for one in tap.watched)), self._tap)
        return first is self._tap

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """Those that are still there, by the numbers they have in the run."""
        known = [(number, ref()) for ref, number in self._tap.numbers.values()]
        found = {self.names.number(self._watching.names, n, one): one for n, one in known if one is not None}
        return dict(sorted(found.items()))

    def _log_groups(self, step: OptimizerStep, place: str) -> None:
        """The learning rate of the first group is logged at every step anyhow."""
        known = self._known.setdefault(step.number, Hyperparameters())
        for at, values in known.at(group_numbers(step.optimizer.param_groups), self._watching.training.steps.number):
            values.pop(RATE, None)
            self._watching.log({f"{place}/{name}": value for name, value in values.items()}, step=at)

    def _watch_for_skip(self, found_inf: Tensor) -> None:
        pending, step, now = PendingScalars([found_inf]), self._watching.training.steps.number, time.time()

        def resolve() -> Event | None:
            message = "the optimizer skipped this step: a gradient was not finite after unscaling"
            skipped = pending.resolve()[0] > 0
            return Event(type="skipped_step", message=message, step=step, time=now) if skipped else None

        self._session.writer.put(resolve, 8, step=step)
