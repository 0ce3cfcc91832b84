"""What a trainer of transformers tells the session, and what its adapters look like now and then."""

from __future__ import annotations

from typing import Any

from sonde.adapters.transformers import SondeCallback
from sonde.session import NullSession, Session
from sonde.tune.lora import AdapterRecorder


class RecordingCallback(SondeCallback):
    """Records as `SondeCallback` does, and measures adapters."""

    def __init__(self, session: Session | NullSession, *, adapters_every: int, watch: dict[str, Any]) -> None:
        super().__init__(session, watch=watch)
        self.adapters_every = adapters_every
        self.adapters: AdapterRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        super().on_train_begin(args, state, control, **given)
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
