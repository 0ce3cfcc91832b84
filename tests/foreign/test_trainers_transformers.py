"""Hugging Face's Trainer and TRL's, with tiny models from configurations, PEFT among them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from trial import Trial, Witnessed, trainer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from sonde.adapters.transformers import SondeCallback  # noqa: E402
from tasks import causal  # noqa: E402

STEPS = 40
NOT_REPEATABLE = ("runtime", "per_second", "total_flos", "elapsed", "time")


class OracleCallback(TrainerCallback):
    """Attaches the oracle once the trainer has made the optimizer, and hears what the trainer logs."""

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle
        self.losses: list[float] = []
        """Of the micro-batches since the last step that was logged."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        optimizer = given["optimizer"]
        self.oracle.watch(given["model"])
        self.oracle.follow(getattr(optimizer, "optimizer", optimizer))
        if state.global_step:
            self.oracle.rewind(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        """A trainer counts steps from 1, once they are made."""
        numbers = {k: v for k, v in logs.items() if isinstance(v, int | float) and not k.endswith(NOT_REPEATABLE)}
        self.oracle.log(numbers, max(state.global_step - 1, 0))
        if "loss" in logs and self.losses:
            # Of micro-batches the sum, where the model divides by the number of tokens of all of them.
            wanted = [sum(self.losses), sum(self.losses) / len(self.losses)]
            assert min(abs(loss - logs["loss"]) for loss in wanted) < 2e-3 * abs(logs["loss"]) + 1e-6, self.losses
            self.losses.clear()


def listen(made: Any) -> None:
    """Let the oracle's callback hear the loss of every micro-batch, to know that the trainer logs it at its step."""
    heard = [c.losses for c in made.callback_handler.callbacks if isinstance(c, OracleCallback)]
    original = made.compute_loss

    def compute_loss(*args: Any, **given: Any) -> Any:
        result = original(*args, **given)
        loss = result[0] if isinstance(result, tuple) else result
        for losses in heard if loss.requires_grad else ():
            losses.append(loss.item())
        return result

    made.compute_loss = compute_loss


def callbacks_of(trial: Trial, **options: Any) -> list[Any]:
    if isinstance(trial, Witnessed):
        return [OracleCallback(trial.oracle)]
    return [SondeCallback(**trial.options, **options)]


def settings(folder: Path | str = "out", **given: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": STEPS,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "seed": 0,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **given,
    }


def rows(num: int = 8 * STEPS, length: int = 16) -> list[dict[str, Any]]:
    """Sentences, each of which comes once."""
    batches = islice(causal(8, length), num // 8)
    return [{"input_ids": ids, "labels": ids.clone()} for batch in batches for ids in batch["input_ids"]]


def gpt() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=2, n_head=2, pad_token_id=0))


def train(trial: Trial, model: Any = None, *, kind: Any = Trainer, resume: Any = None, **given: Any) -> Any:
    """Train to the end and keep what it has come to."""
    num_rows = given.pop("num_rows", 8 * STEPS)
    made = kind(
        model or gpt(),
        TrainingArguments(**settings(**given)),
        train_dataset=rows(num_rows),
        eval_dataset=rows(16),
        callbacks=callbacks_of(trial),
    )
    listen(made)
    made.train(resume_from_checkpoint=resume)
    keep(trial, made)
    return made


def keep(trial: Trial, made: Any) -> None:
    optimizer = made.optimizer
    losses = [entry[name] for entry in made.state.log_history for name in ("loss", "eval_loss") if name in entry]
    trial.trained(made.model, [getattr(optimizer, "optimizer", optimizer)], losses)


@trainer("HF Trainer", is_quick=True)
def plain(trial: Trial) -> None:
    """All defaults, clipping to a norm of 1 among them."""
    train(trial)


@trainer("HF Trainer, no clipping, cosine and warm-up")
def unclipped(trial: Trial) -> None:
    train(trial, max_grad_norm=0.0, lr_scheduler_type="cosine", warmup_steps=5, weight_decay=0.1)


@trainer("HF Trainer, accumulation", is_quick=True)
def accumulation(trial: Trial) -> None:
    train(trial, gradient_accumulation_steps=4, max_steps=20, num_rows=8 * 80)


@trainer("HF Trainer, accumulation with an incomplete last group")
def incomplete(trial: Trial) -> None:
    """Eleven batches an epoch, four to a step."""
    train(trial, gradient_accumulation_steps=4, max_steps=-1, num_train_epochs=6, num_rows=88)


@trainer("HF Trainer, bf16")
def bf16(trial: Trial) -> None:
    train(trial, bf16=True)


@trainer("HF Trainer, a model in bfloat16")
def pure_bf16(trial: Trial) -> None:
    train(trial, gpt().bfloat16())


@trainer("HF Trainer, gradient checkpointing")
def checkpointing(trial: Trial) -> None:
    train(trial, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


@trainer("HF Trainer, gradient checkpointing, reentrant")
def checkpointing_reentrant(trial: Trial) -> None:
    if isinstance(trial, Witnessed):
        trial.oracle.is_reentrant = True
    train(trial, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


@trainer("HF Trainer, evaluation in between")
def evaluation(trial: Trial) -> None:
    train(trial, eval_strategy="steps", eval_steps=8, per_device_eval_batch_size=8, load_best_model_at_end=False)


@trainer("HF Trainer, label smoothing")
def smoothing(trial: Trial) -> None:
    """The trainer's own loss, which the model does not know."""
    train(trial, label_smoothing_factor=0.1)


@trainer("HF Trainer, logged every five steps")
def seldom(trial: Trial) -> None:
    train(trial, logging_steps=5)


@trainer("HF Trainer, Adafactor")
def adafactor(trial: Trial) -> None:
    train(trial, optim="adafactor", learning_rate=1e-2)


@trainer("HF Trainer, NEFTune noise")
def neftune(trial: Trial) -> None:
    train(trial, neftune_noise_alpha=1.0)


@trainer("HF Trainer, torch.compile")
def compiled(trial: Trial) -> None:
    """What is inside of a compiled region is not seen: only its outputs."""

    class Telling(Trainer):
        def compute_loss(self, *args: Any, **given: Any) -> Any:
            loss, outputs = super().compute_loss(*args, **{**given, "return_outputs": True})
            trial.saw("model", outputs)
            return (loss, outputs) if given.get("return_outputs") else loss

    if isinstance(trial, Witnessed):
        trial.oracle.is_blind = True
    train(trial, kind=Telling, torch_compile=True, torch_compile_backend="aot_eager")


@trainer("HF Trainer, resumed from an older checkpoint", is_quick=True)
def resumed(trial: Trial) -> None:
    """Twenty steps, then from the tenth on once more, with other data: the first ten of one history, the rest of the
    other."""
    folder = "resumed"
    first = train(trial, output_dir=folder, max_steps=20, save_strategy="steps", save_steps=10)
    if isinstance(trial, Witnessed):
        trial.oracle.leave(trial.optimizers[0])
    del first
    train(trial, output_dir=folder, max_steps=STEPS, resume=f"{folder}/checkpoint-10", learning_rate=2e-3)


@trainer("HF Trainer, trained twice", has_attempts=False)
def twice(trial: Trial) -> None:
    """`train` called again is another run, which begins with the weights of the first."""
    made = train(trial, max_steps=10)
    if isinstance(trial, Witnessed):
        trial.oracle.leave(trial.optimizers[0])
        trial.oracle.rewind(0)
    made.args.max_steps = 30
    made.optimizer = made.lr_scheduler = None
    made.train()
    keep(trial, made)


@trainer("PEFT LoRA in HF Trainer", is_quick=True)
def lora(trial: Trial) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(gpt(), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["c_attn", "c_fc"]))
    train(trial, model, learning_rate=1e-2)


@pytest.mark.parametrize("program", trainer.of(__name__))
def test_trainer(program: Any, tmp_path: Path) -> None:
    program.examine(tmp_path).check()
