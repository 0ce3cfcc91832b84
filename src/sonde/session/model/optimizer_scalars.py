"""The scalars of a model's optimizers: hyperparameters, loss scale, clipping, and skipped steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, Final

from torch.optim import Optimizer

from sonde.probe.model import ModelNames
from sonde.probe.optimizer.hyperparameters import RATE, Hyperparameters, group_numbers
from sonde.probe.optimizer.tap import OptimizerStep, OptimizerTap
from sonde.reduce.scalars import PendingScalars
from sonde.schema.records import Event
from sonde.session.model.optimizer_names import OptimizerNames

MAX_CLIPS: Final = 8
"""Parameter groups clipped separately; above this limit only `clip_factor` is recorded for each."""


class OptimizerScalars:
    """The optimizer scalars of one watched model. All models of a session share the names. Records nothing by
    itself."""

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

    def rates_now(self) -> dict[str, Any]:
        """The learning rates as they are now."""
        found = {self.names.of(self._model, n, one): one for n, one in self._numbered()}
        rates = {f"{place}/lr": one.param_groups[0].get(RATE) for place, one in found.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def groups(self, step: OptimizerStep, at: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Hyperparameters that have changed, at their steps. `rates` has the learning rate of the first group."""
        if not self._is_reported(step):
            return
        known, place = self._known.setdefault(step.number, Hyperparameters()), self.place(step)
        for number, values in known.at(group_numbers(step.optimizer.param_groups), at):
            values.pop(RATE, None)
            yield number, {f"{place}/{name}": value for name, value in values.items()}

    def skipped(self, step: OptimizerStep, at: int) -> Callable[[], Event | None] | None:
        """Creates an event if this step is skipped, which is known only after the device has answered."""
        if step.found_inf is None or not self._is_reported(step):
            return None
        pending, now = PendingScalars([step.found_inf]), time.time()

        def resolve() -> Event | None:
            message = "the optimizer skipped this step: a gradient was NaN or Inf after unscaling"
            skipped = pending.resolve()[0] > 0
            return Event(type="skipped_step", message=message, step=at, time=now) if skipped else None

        return resolve

    def clipped(self, step: OptimizerStep) -> dict[str, Any]:
        """The total norm and the limit of `clip_grad_norm_`. If parts of the parameters were clipped separately, one
        pair for each part, in the order of the optimizer's parameters."""
        values: dict[str, Any] = {}
        if not self._is_reported(step):
            return values
        for number, (norm, limit) in enumerate(step.clips.norms[:MAX_CLIPS]):
            place = f"{self.place(step)}/clip.{number}" if number else self.place(step)
            values[f"{place}/grad_norm"], values[f"{place}/max_norm"] = norm, limit
        return values

    def place(self, step: OptimizerStep) -> str:
        """The prefix of the scalars' names."""
        return self.names.of(self._model, step.number, step.optimizer)

    def _is_reported(self, step: OptimizerStep) -> bool:
        """Whether to report this optimizer here: one that trains several models is reported with the first."""
        first = next((tap for tap in self._taps() if any(one is step.optimizer for one in tap.watched)), self._tap)
        return first is self._tap

    @property
    def optimizers(self) -> dict[int, Optimizer]:
        """The optimizers that still exist, by their numbers in the run."""
        return dict(
            sorted(((self.names.number(self._model, n, one), one) for n, one in self._numbered()), key=itemgetter(0))
        )

    def _numbered(self) -> list[tuple[int, Optimizer]]:
        return [(number, one) for ref, number in self._tap.numbers.values() if (one := ref()) is not None]
