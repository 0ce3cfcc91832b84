"""The scalars of a model's optimizers: their hyperparameters, the loss scale, what clipping saw, and skipped steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from torch.optim import Optimizer

from sonde.probe.model import ModelNames
from sonde.probe.optimizer.hyperparameters import RATE, Hyperparameters, group_numbers
from sonde.probe.optimizer.tap import OptimizerStep, OptimizerTap
from sonde.reduce.scalars import PendingScalars
from sonde.schema.records import Event
from sonde.session.model.optimizer_names import OptimizerNames

MAX_CLIPS: Final = 8
"""Parts of the parameters that are clipped by themselves: beyond that only `clip_factor` tells of each."""


class OptimizerScalars:
    """Of one watched model. All models of a session share the names. Records nothing by itself."""

    def __init__(
        self, model: ModelNames, tap: OptimizerTap, names: OptimizerNames, taps: Callable[[], Iterable[OptimizerTap]]
    ) -> None:
        self._model, self._tap, self._taps = model, tap, taps
        self.names = names
        names.expect(model, tap.watched)
        self._known: dict[int, Hyperparameters] = {}

    def rates(self, step: OptimizerStep) -> dict[str, Any]:
        """The learning rate and the loss scale of this step."""
        if not self._is_reported(step):
            return {}
        place = self.place(step)
        values = {f"{place}/lr": step.lr, f"{place}/loss_scale": step.loss_scale}
        return {name: value for name, value in values.items() if value is not None}

    def groups(self, step: OptimizerStep, at: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Hyperparameters that have changed, at their steps. `rates` has the learning rate of the first group."""
        if not self._is_reported(step):
            return
        known, place = self._known.setdefault(step.number, Hyperparameters()), self.place(step)
        for number, values in known.at(group_numbers(step.optimizer.param_groups), at):
            values.pop(RATE, None)
            yield number, {f"{place}/{name}": value for name, value in values.items()}

    def skipped(self, step: OptimizerStep, at: int) -> Callable[[], Event | None] | None:
        """Makes an event if this step is skipped, which is not known before the device has answered."""
        if step.found_inf is None or not self._is_reported(step):
            return None
        pending, now = PendingScalars([step.found_inf]), time.time()

        def resolve() -> Event | None:
            message = "the optimizer skipped this step: a gradient was not finite after unscaling"
            skipped = pending.resolve()[0] > 0
            return Event(type="skipped_step", message=message, step=at, time=now) if skipped else None

        return resolve

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
        return self.names.of(self._model, step.number, step.optimizer)

    def _is_reported(self, step: OptimizerStep) -> bool:
        """Whether to report it here: the numbers of an optimizer that trains several models come with the first."""
        first = next((tap for tap in self._taps() if any(one is step.optimizer for one in tap.watched)), self._tap)
        return first is self._tap

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """Those that are still there, by the numbers they have in the run."""
        known = [(number, ref()) for ref, number in self._tap.numbers.values()]
        found = {self.names.number(self._model, n, one): one for n, one in known if one is not None}
        return dict(sorted(found.items()))
