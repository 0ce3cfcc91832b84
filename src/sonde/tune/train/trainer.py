"""TRL's `SFTTrainer` with our checkpoints: atomic, verified, without pickle, and resumed bit by bit.

A method's own `train_step` runs under the trainer's accumulation, precision and scaler; `RecordingCallback` reports the
training to the session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback
from trl import SFTTrainer

from sonde.adapters.transformers import SondeCallback, inner_optimizer
from sonde.display import print_line
from sonde.errors import UsageError
from sonde.session import NullSession, Session
from sonde.session.keywords import WatchKeywords
from sonde.tune.checkpoint.manager import CheckpointManager
from sonde.tune.checkpoint.rng import put_rng
from sonde.tune.checkpoint.tree import decode
from sonde.tune.config import KeepConfig
from sonde.tune.lora import AdapterRecorder
from sonde.tune.method import FineTuningMethod
from sonde.tune.train.console import Console, introduction, is_terminal

STATE_NAME = "trainer_state.json"
RETAINED = "retained"


class RecordedTrainer(SFTTrainer):  # type: ignore[misc]
    """`save_strategy` decides when; `save_checkpoint` of the method is used at the end."""

    def __init__(
        self,
        *,
        method: FineTuningMethod,
        keep: KeepConfig,
        folder: Path,
        eval_dataset: Any = None,
        retained_dataset: Any = None,
        is_verbose: bool = True,
        **given: Any,
    ) -> None:
        self.method, self.keep, self.folder = method, keep, folder
        self.manager: CheckpointManager | None = None
        sets = {name: data for name, data in (("", eval_dataset), (RETAINED, retained_dataset)) if data is not None}
        super().__init__(eval_dataset=sets or None, **given)  # which tokenizes them
        prepared: dict[str, Any] = vars(self)["eval_dataset"] or {}
        self.retained_dataset = prepared.get(RETAINED)
        self.eval_dataset: Any = prepared.get("")
        for theirs in (ProgressCallback, PrinterCallback):
            self.remove_callback(theirs)
        self.console = Console(has_bar=is_terminal() and not self.args.disable_tqdm)
        if is_verbose and self.is_world_process_zero():
            self.add_callback(self.console)
            print_line("\n".join(introduction(self.model, self.train_dataset, self.args.max_length)))

    def mean_loss(self, otherwise: float) -> float:
        """Over all steps: the trainer's own leaves out those before it was resumed."""
        weighted = num_steps = 0.0
        for entry in self.state.log_history:
            if "loss" in entry:
                weighted += entry["loss"] * (entry["step"] - num_steps)
                num_steps = entry["step"]
        return weighted / num_steps if num_steps else otherwise

    def log(self, logs: dict[str, float], *rest: Any, **given: Any) -> None:
        if "train_loss" in logs:
            logs["train_loss"] = self.mean_loss(logs["train_loss"])
        super().log(logs, *rest, **given)

    def checkpoints(self) -> CheckpointManager:
        """Created when the optimizer exists."""
        if self.manager is None:
            scaler = self.accelerator.scaler
            self.manager = CheckpointManager(
                self.folder,
                model=self.accelerator.unwrap_model(self.model),
                optimizer=inner_optimizer(self.optimizer),
                scheduler=self.lr_scheduler,
                scaler=scaler,
                interval=None,
                keep_last=self.keep.keep_last,
                keep_best=self.keep.keep_best,
                metric=self.keep.metric,
                mode=self.keep.mode,
                adapters_only=self.method.is_adapter,
                background=self.keep.background,
            )
            self.manager.documents[STATE_NAME] = self._state_document
        return self.manager

    def _state_document(self) -> Any:
        """The state from which the trainer finds its position; numbers that JSON lacks become null."""
        for part in (*self.callback_handler.callbacks, self.control):
            if isinstance(part, ExportableState):
                self.state.stateful_callbacks[type(part).__name__] = part.state()
        return _plain(dataclasses.asdict(self.state))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        metrics: dict[str, float] = {}
        for entry in self.state.log_history:
            if entry.get("step") == self.state.global_step:
                metrics.update({name: value for name, value in entry.items() if _is_metric(name, value)})
        self.checkpoints().try_save(self.state.global_step, metrics)

    def training_step(self, model: Any, inputs: Any, *rest: Any, **given: Any) -> torch.Tensor:
        if self.method.uses_trainer_step:
            loss: torch.Tensor = super().training_step(model, inputs, *rest, **given)
            return loss
        return own_step(self, model, inputs)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Also evaluate what the model could do before it was tuned."""
        metrics: dict[str, float] = {}
        if eval_dataset is not None or self.eval_dataset is not None:
            metrics.update(super().evaluate(eval_dataset, ignore_keys, metric_key_prefix))
        if eval_dataset is None and self.retained_dataset is not None:
            prefix = f"{metric_key_prefix}_{RETAINED}"
            metrics.update(super().evaluate(self.retained_dataset, ignore_keys, prefix))
        return metrics

    # -------------------------------------------------------------------------------------------- instead of unpickling

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights are restored together with the optimizer, which does not exist yet."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.checkpoints().restore(Path(checkpoint).name, rng=False)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restored with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called when the batches that were already seen have been skipped."""
        if checkpoint is not None:
            payload = self.checkpoints().load(Path(checkpoint).name)
            put_rng(decode(payload.state["rng"], payload.tensors.get("state", {})))


def _is_metric(name: str, value: Any) -> bool:
    is_wanted = name == "loss" or (name.startswith("eval_") and not name.endswith(("_runtime", "_per_second")))
    return is_wanted and isinstance(value, int | float)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    return value if value is None or isinstance(value, bool | int | str) else None


def own_step(trainer: Any, model: Any, inputs: Any) -> Tensor:
    """Run `train_step`; returns its loss as the trainer counts it: divided by the number of micro-batches."""
    model.train()
    if callable(getattr(trainer.optimizer, "train", None)):
        trainer.optimizer.train()
    backward = _ScaledBackward(trainer)
    with trainer.compute_loss_context_manager(), trainer.accelerator.autocast(), backward.in_place():
        given = trainer.method.train_step(trainer._prepare_inputs(inputs))
    loss = _checked(trainer, given, is_backward_done=backward.num_calls > 0)
    if not backward.num_calls:
        trainer.accelerator.backward(loss / backward.num_micro_batches)
    return loss.detach() / backward.num_micro_batches


class _ScaledBackward:
    """`loss.backward()` inside `train_step`: the gradients of a micro-batch count as one of N."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.num_calls = trainer, 0
        self.num_micro_batches: int = trainer.current_gradient_accumulation_steps

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """`Tensor.backward` calls `torch.autograd.backward`, looked up at each call: both are replaced."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            torch.autograd.backward = original
            try:
                with torch.autocast(self.trainer.args.device.type, enabled=False):
                    self._run(original, tensors, args, kwargs)
            finally:
                torch.autograd.backward = backward
            self.num_calls += 1

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def _run(self, original: Any, tensors: Any, args: Any, kwargs: Any) -> None:
        is_plain = isinstance(tensors, Tensor) and all(v is None or v is False for v in (*args, *kwargs.values()))
        if is_plain:
            self.trainer.accelerator.backward(tensors / self.num_micro_batches)
            return
        scaler = self.trainer.accelerator.scaler
        parts = [part / self.num_micro_batches for part in ([tensors] if isinstance(tensors, Tensor) else tensors)]
        original([part if scaler is None else scaler.scale(part) for part in parts], *args, **kwargs)


def _checked(trainer: Any, given: Any, *, is_backward_done: bool) -> Tensor:
    """The loss as a tensor, or an error that says what `train_step` must return."""
    step = f"{type(trainer.method).__name__}.train_step"
    if isinstance(given, int | float) and is_backward_done:
        given = torch.tensor(float(given), device=trainer.args.device)
    if not isinstance(given, Tensor):
        raise UsageError(f"{step} returned {_described(given)}; return the loss of the batch:  return loss")
    if given.numel() != 1:
        raise UsageError(
            f"{step} returned a tensor of shape {tuple(given.shape)}; return a single number:  return loss.mean()"
        )
    if not is_backward_done and not given.requires_grad:
        raise UsageError(
            f"{step} returned a loss without a graph and never called backward(), so nothing would train. Call "
            "loss.backward(), or return the loss without detach()."
        )
    return given.reshape(())


def _described(given: Any) -> str:
    return "None" if given is None else f"a {type(given).__name__}"


class RecordingCallback(SondeCallback):
    """Records as `SondeCallback` does, and measures adapters."""

    def __init__(self, session: Session | NullSession, *, adapters_every: int, watch: WatchKeywords) -> None:
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
                self.adapters.session.recording.breaker("adapters", error)
