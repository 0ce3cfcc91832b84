"""Lightning: one callback records everything, with automatic and manual optimization and several optimizers.

    trainer = Trainer(callbacks=[SondeCallback(project="gpt")])

Gradients are read where the optimizers step: unscaled, accumulated, as they are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sonde.errors import MissingPackageError
from sonde.read.scalars import logged_since
from sonde.schema.layout import RUN_FILE
from sonde.session import NullSession, Session
from sonde.session.joining import Hosted

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError as error:
        raise MissingPackageError("lightning", "lightning", "SondeCallback") from error


class SondeCallback(Hosted, Callback):  # type: ignore[misc]
    """Records `Trainer.fit`. A session given, or begun before, is used and left open; else one is begun.

    `SondeCallback(project="gpt", name="baseline", watch={"activations": False})`: `watch` has the keywords of
    `sonde.watch`, all others are those of `sonde.init`.
    """

    def __init__(self, session: Session | NullSession | None = None, **options: Any) -> None:
        super().__init__(session, **options)
        self._resumed: dict[str, Any] = {}
        self._logged: dict[str, tuple[Any, int]] = {}
        self._micro: dict[str, list[Any]] = {}
        """What the micro-batches of this step have logged so far."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        run = Path(self._resumed["run"]) if self._resumed.get("run") else None
        if run is not None and not (run / RUN_FILE).is_file():
            run = None  # the checkpoint came without its run
        session = self._joining.begin(_config(trainer, pl_module), resume=run)
        session.watch(pl_module, list(trainer.optimizers) or None, **self.watch)
        step = int(self._resumed.get("step", trainer.global_step))
        if step and isinstance(session, Session):
            self._joining.continue_at(step, logged_since(session.path, step) if run is not None else [])

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._is_accumulating(trainer):
            for name, value in trainer.callback_metrics.items():
                self._micro.setdefault(name, []).append(value)
        else:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module's own end of the epoch comes after ours; what it logged there is still of the last step."""
        if isinstance(self.session, Session) and self.session.is_step_over:
            self._log(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer)

    def _is_accumulating(self, trainer: Trainer) -> bool:
        """Whether the optimizer waits for more micro-batches."""
        is_several = trainer.accumulate_grad_batches > 1 and trainer.lightning_module.automatic_optimization
        return is_several and isinstance(self.session, Session) and not self.session.is_step_over

    def _log(self, trainer: Trainer) -> None:
        """What is new among the numbers that the module logged: Lightning keeps the old ones beside them."""
        session, micro, self._micro = self.session, self._micro, {}
        if session is None:
            return
        step = max(session.step_number - session.is_finished, 0)  # afterwards: at the last step
        fresh = {name: value for name, value in trainer.callback_metrics.items() if self._is_new(name, value, step)}
        self._logged.update({name: (value, step) for name, value in fresh.items()})
        self._joining.log({name: _mean(micro.get(name, []), value) for name, value in fresh.items()}, step)

    def _is_new(self, name: str, value: Any, step: int) -> bool:
        """Lightning hands out a view of what was logged last, be it long ago. And after a validation it makes the
        training's numbers anew: of one step the first is the one."""
        known, at = self._logged.get(name, (None, -1))
        return at != step and (known is None or known.data_ptr() != value.data_ptr())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Also when a cluster takes its machine back: Lightning calls that an exit, and we an interruption."""
        self._logged, self._micro = {}, {}
        is_terminated = type(exception).__name__ == "SIGTERMException"
        self._joining.end(KeyboardInterrupt("SIGTERM") if is_terminated else exception)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer)
        self._logged = {}
        self._joining.end()

    def state_dict(self) -> dict[str, Any]:
        """Kept in Lightning's checkpoints, so that a training that goes on finds its run."""
        session = self.session
        if not isinstance(session, Session):
            return {}
        return {"run": str(session.path.absolute()), "step": session.next_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = dict(state_dict)


TracerCallback = SondeCallback


def _mean(before: list[Any], last: Any) -> Any:
    """Of all micro-batches of a step; tensors are not waited for. One that was not logged anew has been counted."""
    distinct = list({value.data_ptr(): value for value in (*before, last)}.values())
    return sum(distinct) / len(distinct) if len(distinct) > 1 else last


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
