"""`TrainingWrapper`: fine-tunes a language model with transformers, TRL and PEFT, and records everything."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonde.errors import MissingPackageError, RunError, UsageError
from sonde.read.run.checkpoints import Checkpoint, list_checkpoints
from sonde.read.run.link import linked_run
from sonde.session import NullSession, Session
from sonde.session.entry.trainer import TrainerSession
from sonde.session.keywords import WatchKeywords
from sonde.tune.config import KeepConfig, MethodConfig, ModelConfig, RecordConfig, TrainingConfig, checked
from sonde.tune.method import FineTuningMethod
from sonde.tune.methods import find_method
from sonde.tune.train.data import as_dataset, texts_of
from sonde.tune.train.model import load_model, load_tokenizer
from sonde.tune.train.output import FINAL_FOLDER, MERGED_FOLDER, check_same, open_output
from sonde.write.checkpoints import write_link
from sonde.write.folder import absolute


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training."""

    run: Path | None
    """The recorded run; None if sonde is disabled."""
    output_dir: Path
    model: Any
    tokenizer: Any
    num_steps: int
    train_loss: float
    metrics: dict[str, float]
    checkpoints: list[Checkpoint]


class TrainingWrapper:
    """A model, a method and how to train it.

    wrapper = TrainingWrapper(model_name="meta-llama/Llama-2-7b-hf", training_method="lora", checkpoint_interval=100)
    wrapper.train(dataset=dataset, output_dir="./checkpoints", num_epochs=3)
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        training_method: str | FineTuningMethod = "lora",
        checkpoint_interval: int = 100,
        wandb_project: str | None = None,
        method: Mapping[str, Any] | MethodConfig | None = None,
        keep: Mapping[str, Any] | KeepConfig | None = None,
        run: Mapping[str, Any] | RecordConfig | None = None,
        watch: WatchKeywords | None = None,
        **training: Any,
    ) -> None:
        """`method`, `keep` and `run` are the sections of a `sonde train` file of these names; `training` are the keys
        of its loop: `learning_rate=1e-3, batch_size=4, …`. `watch` goes to `Session.watch`."""
        self.model_config: ModelConfig | None = None if model_name is None else ModelConfig(name=model_name)
        self.model = model
        if isinstance(model, ModelConfig):
            self.model_config, self.model = model, None
        if (self.model is None) == (self.model_config is None):
            raise UsageError("pass either model_name= for a saved model or model= for one you have built.")
        self.tokenizer = tokenizer
        self.method = find_method(training_method)
        self.options = _part(MethodConfig, method, "method")
        if isinstance(training_method, str):
            self.options = self.options.model_copy(update={"name": training_method})
        self.keep = _part(KeepConfig, keep, "checkpoints")
        if "interval" not in self.keep.model_fields_set:
            self.keep = checked(KeepConfig, {**self.keep.model_dump(), "interval": checkpoint_interval}, "checkpoints")
        self.record = _part(RecordConfig, run, "run")
        if wandb_project is not None:
            self.record = self.record.model_copy(update={"wandb_project": wandb_project})
        self.training: TrainingConfig = checked(TrainingConfig, training, "training")
        self.watch: WatchKeywords = watch or {}
        if self.model_config is not None and self.model_config.name is not None:
            self.method.load_options(self.options)  # report what cannot work here before anything is loaded

    def train(
        self,
        dataset: Any,
        output_dir: str | os.PathLike[str] = "checkpoints",
        num_epochs: float | None = None,
        *,
        eval_dataset: Any = None,
        retained_dataset: Any = None,
        max_steps: int | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> TrainingResult:
        """Train, record and save. `retained_dataset` holds texts that the model already knows, to detect forgetting.
        `resume` continues from the newest checkpoint in `output_dir`, if there is one; `overwrite` deletes existing
        ones. Invalid arguments are reported before the run starts."""
        folder = absolute(output_dir)
        changes = {"num_epochs": num_epochs, "max_steps": max_steps}
        asked = {name: value for name, value in changes.items() if value is not None}
        training: TrainingConfig = checked(TrainingConfig, {**self.training.model_dump(), **asked}, "training")
        train_data = as_dataset(dataset)
        held_out = {"eval_dataset": eval_dataset, "retained_dataset": retained_dataset}
        eval_data = {name: as_dataset(data, name) for name, data in held_out.items() if data is not None}
        found = open_output(folder, resume=resume, overwrite=overwrite)
        config = self._config(training, train_data)
        before = check_same(folder, config) if found else {}
        model, tokenizer = self._prepare(training, train_data)
        arguments = self._arguments(folder, training, model, has_eval=bool(eval_data))
        joining = self._join(folder, config, resume=bool(found))
        session = joining.session
        assert session is not None
        try:
            if isinstance(session, Session) and before.get("data", config["data"]) != config["data"]:
                session.recording.warn_once("resumed data", _other_data(before["data"], config["data"]))
            result = self._fit(session, folder, arguments, model, tokenizer, train_data, eval_data, found)
        except BaseException as error:
            joining.end(error)
            raise
        joining.end()
        return result

    def _prepare(self, training: TrainingConfig, train_data: Any) -> tuple[Any, Any]:
        """The seed is set before the model is built: adapters start at random."""
        from transformers import set_seed

        set_seed(training.seed)
        tokenizer = self.tokenizer
        if tokenizer is None:
            if self.model_config is None:
                raise UsageError("model= also needs its tokenizer=.")
            tokenizer = load_tokenizer(self.model_config, texts_of(train_data))
        model = self.model
        if model is None:
            assert self.model_config is not None
            model = load_model(self.model_config, self.method, self.options, tokenizer)
        prepared = self.method.setup_training(model, self.options)
        if self.options.merge and not self.method.can_merge:
            raise UsageError(
                f"method.merge: what {self.options.name} trains cannot be merged into the model. Leave merge out: the "
                "folder `final` has what was trained."
            )
        return prepared, tokenizer

    def _join(self, folder: Path, config: Mapping[str, Any], *, resume: bool) -> TrainerSession:
        """The session of this process if there is one, else our own."""
        options = self.record.model_dump(include={"project", "name", "dir", "tags", "notes"})
        joining = TrainerSession(None, options)
        session = joining.begin(config, resume=linked_run(folder) if resume else None)
        if session.path is not None:
            write_link(folder, session.path)
        return joining

    def _config(self, training: TrainingConfig, train_data: Any) -> dict[str, Any]:
        model = {"class": type(self.model).__name__} if self.model_config is None else self.model_config.model_dump()
        return {
            "model": model,
            "method": self.options.model_dump(),
            "training": training.model_dump(),
            "checkpoints": self.keep.model_dump(),
            "data": {"num_texts": _num_texts(train_data)},
        }

    def _arguments(self, folder: Path, training: TrainingConfig, model: Any, *, has_eval: bool) -> Any:
        from sonde.tune.train.arguments import trainer_arguments

        self._use_wandb()
        return trainer_arguments(folder, training, self.keep, self.record, model, has_eval=has_eval)

    def _fit(
        self,
        session: Session | NullSession,
        folder: Path,
        arguments: Any,
        model: Any,
        tokenizer: Any,
        train_data: Any,
        eval_data: dict[str, Any],
        found: list[Checkpoint],
    ) -> TrainingResult:
        from sonde.tune.train.console import calm
        from sonde.tune.train.trainer import RecordedTrainer, RecordingCallback

        watch = self.watch
        if self.record.snapshots is not None:
            watch = {"snapshots": _snapshots(self.record.snapshots), **watch}
        with calm(_num_texts(train_data)):
            trainer = RecordedTrainer(
                method=self.method,
                keep=self.keep,
                folder=folder,
                model=model,
                args=arguments,
                train_dataset=train_data,
                **eval_data,
                processing_class=tokenizer,
                is_verbose=not isinstance(session, Session) or session.settings.verbose,
                callbacks=[RecordingCallback(session, adapters_every=self.record.adapters, watch=watch)],
            )
        try:
            output = trainer.train(resume_from_checkpoint=str(found[-1].path) if found else None)
        finally:
            trainer.console.close()
        if trainer.manager is not None:
            trainer.manager.close()
        self._save(folder, tokenizer)
        metrics = {k: v for entry in trainer.state.log_history for k, v in entry.items() if k.startswith("eval_")}
        loss = trainer.mean_loss(output.training_loss)
        return TrainingResult(
            session.path, folder, model, tokenizer, output.global_step, loss, metrics, list_checkpoints(folder)
        )

    def _save(self, folder: Path, tokenizer: Any) -> None:
        """The trained weights, in a format that others can load. Each library reports a full disk differently."""
        from safetensors import SafetensorError

        final, merged = folder / FINAL_FOLDER, folder / MERGED_FOLDER
        try:
            self.method.save_checkpoint(final)
            tokenizer.save_pretrained(final)
            if self.options.merge:
                self.method.merged().save_pretrained(merged)
                tokenizer.save_pretrained(merged)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"training finished, but the model could not be saved to {final}: {error}. Free some space and train "
                "again with resume=True, which resumes from the newest checkpoint."
            ) from error

    def _use_wandb(self) -> None:
        if self.record.wandb_project is None:
            return
        from importlib.util import find_spec

        if find_spec("wandb") is None:
            raise MissingPackageError("wandb", "wandb", "wandb_project=")
        os.environ["WANDB_PROJECT"] = self.record.wandb_project


def _num_texts(dataset: Any) -> int | None:
    """None if they are streamed."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def _other_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return (
        f"resuming with {now.get('num_texts')} texts, but training started with {before.get('num_texts')}: "
        "batches will differ from those of an uninterrupted run."
    )


def _snapshots(interval: int) -> Any:
    from sonde.probe.schedule import every
    from sonde.session.snapshot_plan import Snapshots

    return Snapshots(when=every(interval), kinds=("param", "grad"))


def _part(kind: type[Any], given: Any, name: str) -> Any:
    return given if isinstance(given, kind) else checked(kind, given or {}, name)
