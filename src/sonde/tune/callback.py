"""What a trainer of transformers tells the session: the model when training begins, and every number it logs."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback

from sonde.session import NullSession, Session
from sonde.tune.adapters import AdapterRecorder


class RecordingCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the trainer's model and optimizer, and measures adapters now and then."""

    def __init__(self, session: Session | NullSession, *, adapters_every: int, watch: dict[str, Any]) -> None:
        self.session, self.adapters_every, self.watch = session, adapters_every, watch
        self.adapters: AdapterRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.session.watch(given["model"], inner_optimizer(given["optimizer"]), **self.watch)
        if isinstance(self.session, Session):
            self.adapters = AdapterRecorder(self.session)
            if not self.adapters.follow(given["model"]):
                self.adapters = None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before the step is counted: `global_step` is the number of this one."""
        if self.adapters is None:
            return
        is_last = state.global_step + 1 == state.max_steps
        if state.global_step % self.adapters_every == 0 or is_last or state.global_step < 2:
            try:
                self.adapters.record(state.global_step)
            except Exception as error:  # noqa: BLE001  our failure must not end their training
                self.adapters.session.breaker("adapters", error)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """`loss`, `grad_norm`, `learning_rate`, `eval_loss` and so on, at the step they are of."""
        numbers = {name: value for name, value in (logs or {}).items() if isinstance(value, int | float)}
        self.session.log(numbers, step=max(state.global_step - 1, 0))


def inner_optimizer(optimizer: Any) -> Optimizer:
    """accelerate wraps the one that steps."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
