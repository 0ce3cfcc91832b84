"""Hugging Face's `Trainer` and trainers based on it (`Seq2SeqTrainer`, TRL's): one callback records everything.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[SondeCallback(project="gpt")])

Gradients are read when the optimizer steps: unscaled, accumulated, as it uses them, with their norm before clipping.
Importing this file registers the name, so that `TrainingArguments(report_to="sonde")` does the same.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sonde.errors import MissingPackageError
from sonde.read.run.link import linked_run, linked_step
from sonde.session import Session
from sonde.session.entry.trainer import TrainerMixin
from sonde.write.checkpoints import write_link
from sonde.write.items import KeptRow

try:
    from transformers import Trainer, TrainerCallback
    from transformers.integrations import integration_utils
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise MissingPackageError("transformers", "transformers", "SondeCallback") from error

__all__ = ["SondeCallback", "TracerCallback"]


class SondeCallback(TrainerMixin, TrainerCallback):  # type: ignore[misc]
    """Records a training by `Trainer`. Uses a session that was passed in or is already open, and leaves it open;
    otherwise starts one.

    `SondeCallback(project="gpt", name="baseline", watch={"activations": False})`: `watch` has the keywords of
    `sonde.watch`, all others are those of `sonde.init`.
    """

    checkpoint: Any = None
    """The checkpoint that `Trainer.train` resumes from."""
    _is_swept = False
    _ahead = 0
    """The number of steps of the run before this training, beyond those the trainer counts."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        resumed = _resumed_from(args, self.checkpoint) if state.global_step else None
        run = linked_run(resumed) if resumed is not None else None
        session = self._joining.begin(_config(args, given.get("model")), resume=run)
        optimizer = inner_optimizer(given.get("optimizer"))
        session.watch(given["model"], optimizer, **self.watch)
        self._is_swept = optimizer is None  # one that torch does not know, such as DeepSpeed's
        if state.global_step:
            step = linked_step(resumed) if resumed is not None and run is not None else None
            self._joining.return_to(state.global_step if step is None else step, run)
        self._ahead = session.next_step - state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Gradients are complete and clipped, and not used yet. Without a torch optimizer, read them now."""
        if self._is_swept and self.session is not None:
            self.session.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """Log `loss`, `grad_norm`, `learning_rate`, `eval_loss` and so on, at their steps."""
        self._joining.log(logs or {}, step=max(self._ahead + state.global_step - 1, 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The trainer also counts a step that its scaler has skipped: then there was no optimizer step."""
        session = self.session
        if session is not None and session.next_step < self._ahead + state.global_step:
            session.skip_step()

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Link the run to its checkpoints, and each of them to its run."""
        session = self.session
        if not isinstance(session, Session):
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not folder.is_dir():
            return
        try:
            write_link(folder, session.path, step=self._ahead + state.global_step)
        except OSError as error:
            session.recording.warn_once("checkpoint link", f"{folder} could not be linked to its run: {error}")
        details = {} if state.best_metric is None else {"best_metric": state.best_metric}
        session.recording.writer.kept(
            KeptRow(
                table="checkpoints",
                step=self._ahead + state.global_step,
                time=time.time(),
                where=str(folder.absolute()),
                details=details,
            )
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._joining.end()

    def failed(self, error: BaseException) -> None:
        """`Trainer.train` was left by an exception."""
        self._joining.end(error)


TracerCallback = SondeCallback


def inner_optimizer(optimizer: Any) -> Any:
    """accelerate wraps the optimizer that steps; None if it is not torch's."""
    from torch.optim import Optimizer

    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, Optimizer) else None


def _config(args: Any, model: Any) -> dict[str, Any]:
    """The training arguments, without secrets; the model's own configuration under "model"."""
    found = args.to_sanitized_dict() if hasattr(args, "to_sanitized_dict") else {}
    config: Any = getattr(model, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else {}
    plain = {key: value for key, value in described.items() if isinstance(value, bool | int | float | str)}
    return {**found, **({"model": plain} if plain else {})}


def _resumed_from(args: Any, told: Any) -> Path | None:
    """The checkpoint that a trainer resumes from: the one it was given, or the last one."""
    for named in (told, args.resume_from_checkpoint):
        if isinstance(named, str | os.PathLike) and Path(named).is_dir():
            return Path(named)
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    return Path(last) if last else None


def _telling(train: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer does not tell its callbacks which checkpoint it resumes from, nor that it fails: if the error is
    caught, as in a notebook, the run would stay open."""

    @functools.wraps(train)
    def told(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **given: Any) -> Any:
        found = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, SondeCallback)]
        ours = found[-1] if found else None
        for callback in found[:-1]:  # the callback of `report_to="sonde"`: everything would be logged twice
            trainer.remove_callback(callback)
        if ours is not None:
            ours.checkpoint = resume_from_checkpoint
        try:
            return train(trainer, resume_from_checkpoint, *args, **given)
        except BaseException as error:
            if ours is not None:
                ours.failed(error)
            raise

    return told


Trainer.train = _telling(Trainer.train)
integration_utils.INTEGRATION_TO_CALLBACK.setdefault("sonde", SondeCallback)
