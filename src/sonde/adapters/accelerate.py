"""Accelerate: sonde as one of its trackers. sonde records everything passed to `accelerator.log`.

tracker = SondeTracker(project="gpt")
accelerator = Accelerator(log_with=tracker)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.init_trackers("gpt", config={"lr": 3e-4})
tracker.watch(model, optimizer)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from sonde.errors import MissingPackageError
from sonde.session import NullSession, Session
from sonde.session.entry.trainer import TrainerSession
from sonde.session.keywords import Optimizers, RunKeywords, WatchKeywords, spelled_out

if TYPE_CHECKING:
    from torch import nn

try:
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise MissingPackageError("accelerate", "tune", "SondeTracker") from error

__all__ = ["SondeTracker"]


class SondeTracker(GeneralTracker):  # type: ignore[misc]
    """Uses a session that was passed in or is already open, and leaves it open; otherwise starts one with the options
    of `sonde.init`."""

    name = "sonde"
    requires_logging_directory = False

    @spelled_out(RunKeywords)
    def __init__(self, session: Session | NullSession | None = None, **init: Unpack[RunKeywords]) -> None:
        # Every rank may have one: those other than the first check for non-finite values.
        self.main_process_only = False
        super().__init__()
        self._joining = TrainerSession(session, init)
        self._handled = id(None)
        """The exception that was being handled when the run started: it does not belong to this training."""

    @property
    def tracker(self) -> Session | NullSession:
        """The session; started on first use."""
        return self._begin({})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The `config` of `accelerator.init_trackers`."""
        self._begin(values)

    def _begin(self, config: Mapping[str, Any]) -> Session | NullSession:
        if self._joining.session is None or self._joining.session.is_finished:
            self._handled = id(sys.exc_info()[1])
        return self._joining.begin(config)

    @spelled_out(WatchKeywords)
    def watch(
        self, model: nn.Module, optimizer: Optimizers = None, **keywords: Unpack[WatchKeywords]
    ) -> Session | NullSession:
        """`sonde.watch` for the result of `accelerator.prepare`."""
        return self.tracker.watch(model, getattr(optimizer, "optimizer", optimizer), **keywords)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self.tracker.log(values, step)

    def state_dict(self) -> dict[str, Any]:
        """The run and its next step, for `accelerator.register_for_checkpointing(tracker)`."""
        session = self._joining.session
        return {} if not isinstance(session, Session) else {"run": str(session.path), "step": session.next_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """`accelerator.load_state` has restored a checkpoint: training returns to its step."""
        if "step" in state:
            self._joining.return_to(int(state["step"]), Path(str(state["run"])))

    def finish(self) -> None:
        """`accelerator.end_training()`; in a `finally` or an `except`, the error there ended the training."""
        error = sys.exc_info()[1]
        self._joining.end(None if id(error) == self._handled else error)
