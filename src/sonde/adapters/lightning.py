"""Lightning: one callback records everything, with automatic and manual optimization and several optimizers.

    trainer = Trainer(callbacks=[SondeCallback(project="gpt")])

Gradients are read when the optimizers step: unscaled, accumulated, as they are used.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Unpack

from sonde.errors import MissingPackageError
from sonde.schema.layout import RUN_FILE
from sonde.session import NullSession, Session
from sonde.session.entry.trainer import TrainerMixin
from sonde.session.keywords import RunKeywords, WatchKeywords, spelled_out

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError as error:
        raise MissingPackageError("lightning", "lightning", "SondeCallback") from error

__all__ = ["SondeCallback", "TracerCallback"]


class SondeCallback(TrainerMixin, Callback):  # type: ignore[misc]
    """Records `Trainer.fit`. Uses a session that was passed in or is already open, and leaves it open; otherwise starts
    one.

    `SondeCallback(project="gpt", name="baseline", watch={"activations": False})`: `watch` has the keywords of
    `sonde.watch`, all others are those of `sonde.init`.
    """

    @spelled_out(RunKeywords)
    def __init__(
        self,
        session: Session | NullSession | None = None,
        *,
        watch: WatchKeywords | None = None,
        **init: Unpack[RunKeywords],
    ) -> None:
        super().__init__(session, watch=watch, **init)
        self._resumed: dict[str, Any] = {}
        self._logged: defaultdict[str, tuple[Any, int]] = defaultdict(lambda: (None, -1))
        """The last value of each name and its step. After a validation Lightning recomputes the training's numbers: for
        one step the first counts."""
        self._micro: dict[str, _Mean] = {}
        """Values that the micro-batches of this step have logged so far."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        resumed, self._resumed = self._resumed, {}  # the next `fit` may not load a checkpoint
        run = Path(resumed["run"]) if resumed.get("run") else None
        if run is not None and not (run / RUN_FILE).is_file():
            run = None  # the checkpoint came without its run
        session = self._joining.begin(_config(trainer, pl_module), resume=run)
        session.watch(pl_module, list(trainer.optimizers) or None, **self.watch)
        step = int(resumed.get("step", trainer.global_step))
        if step or run is not None:
            self._joining.return_to(step, run)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._is_accumulating():
            self._collect(trainer)
        else:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module's own end of the epoch comes after ours; values logged there still belong to the last step."""
        if isinstance(self.session, Session) and self.session.recording.is_step_over:
            self._log(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer)

    def _is_accumulating(self) -> bool:
        """Whether the optimizers wait for more micro-batches, by Lightning's accumulation or by the module's own."""
        session = self.session
        return isinstance(session, Session) and not session.is_finished and not session.recording.is_step_over

    def _collect(self, trainer: Trainer) -> None:
        """Add the numbers of a micro-batch to those of its step."""
        for name, value in trainer.callback_metrics.items():
            if not self._is_old(name, value):
                self._micro.setdefault(name, _Mean()).add(value)

    def _log(self, trainer: Trainer, *, is_last: bool = False) -> None:
        """Log the new values among those that the module logged: Lightning keeps the old ones with them.

        In the middle of an accumulation, as at a validation, the numbers of micro-batches wait for the rest of their
        step.
        """
        session = self.session
        if session is None:
            return
        micro, self._micro = self._micro, {}
        if self._is_accumulating() and not is_last:
            self._micro = micro
        step = max(session.step_number - session.is_finished, 0)  # afterwards: at the last step
        fresh = {
            name: value
            for name, value in trainer.callback_metrics.items()
            if name not in self._micro and not self._is_old(name, value) and self._logged[name][1] != step
        }
        self._logged.update({name: (value, step) for name, value in fresh.items()})
        self._joining.log({name: micro.get(name, _Mean()).add(value) for name, value in fresh.items()}, step)

    def _is_old(self, name: str, value: Any) -> bool:
        """Whether it was logged before: Lightning returns a view of the last logged value, however old."""
        known, _ = self._logged[name]
        return known is not None and known.data_ptr() == value.data_ptr()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Also when a cluster preempts the machine: Lightning calls that an exit, and sonde an interruption."""
        self._logged.clear()
        self._micro.clear()
        is_terminated = type(exception).__name__ == "SIGTERMException"
        self._joining.end(KeyboardInterrupt("SIGTERM") if is_terminated else exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer, is_last=True)
        self._logged.clear()
        self._joining.end()

    def state_dict(self) -> dict[str, Any]:
        """Kept in Lightning's checkpoints, so that a resumed training finds its run."""
        session = self.session
        if not isinstance(session, Session):
            return {}
        return {"run": str(session.path.absolute()), "step": session.next_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = dict(state_dict)


TracerCallback = SondeCallback


class _Mean:
    """The mean over the micro-batches of a step, on their device; nothing waits."""

    def __init__(self) -> None:
        self._total: Any = 0.0
        self._num = 0
        self._last: Any = None

    def add(self, value: Any) -> Any:
        """The mean so far. Lightning returns the same tensor again if nothing new was logged: it counts once."""
        if self._last is None or self._last.data_ptr() != value.data_ptr():
            self._total, self._num, self._last = self._total + value, self._num + 1, value
        return self._total / self._num if self._num > 1 else value


def _config(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    config = {
        name: value for name, value in dict(module.hparams).items() if isinstance(value, bool | int | float | str)
    }
    return {
        **config,
        "trainer": {
            "max_epochs": trainer.max_epochs,
            "max_steps": trainer.max_steps,
            "precision": str(trainer.precision),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradient_clip_val": trainer.gradient_clip_val,
        },
    }
