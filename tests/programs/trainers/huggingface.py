"""Programs in Hugging Face's `Trainer`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sonde.adapters.transformers import SondeCallback
from trainers.program import program
from trainers.texts import PAD, VOCABULARY, Items, bert, corpus, gpt, sentences, texts

STUCK = ("underfitting", "loss_plateau", "constant_output")


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "max_steps": 160,
        "learning_rate": 3e-3,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**given, **changes})


def train(
    folder: Path, model: nn.Module, data: Any, *, kind: type[Trainer] = Trainer, args: Any = None, **more: Any
) -> None:
    callbacks = [SondeCallback(project="trainers", dir=str(folder), verbose=False), *more.pop("callbacks", ())]
    trainer = kind(model=model, args=arguments(folder, **(args or {})), train_dataset=data, callbacks=callbacks, **more)
    trainer.train()


EVALUATED = {"eval_strategy": "steps", "eval_steps": 20}

# ------------------------------------------------------------------------------------------------- learning rate


@program("huggingface_warmup_never_ends", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), args={"warmup_steps": 16 if fixed else 100_000})


@program("huggingface_bert_warmup_in_samples", "lr_too_low", also_ok=STUCK, source="warmup_steps counts samples")
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, bert(), sentences(), eval_dataset=sentences(256, 1),
        args=dict(learning_rate=1e-3, warmup_steps=20 if fixed else 20_480, **EVALUATED),
    )  # fmt: skip


@program("huggingface_lr_high", "lr_too_high", also_ok=("loss_oscillation", "exploding_gradients", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), args={"learning_rate": 3e-3 if fixed else 0.3})


@program("huggingface_bert_lr_high", "lr_too_high", also_ok=("loss_oscillation", "rank_collapse", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, bert(), sentences(), eval_dataset=sentences(256, 1),
        args=dict(learning_rate=1e-3 if fixed else 0.1, **EVALUATED),
    )  # fmt: skip


@program("huggingface_lr_high_moderate", "lr_too_high", also_ok=("loss_oscillation", "loss_spikes", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(n_layer=4), corpus(), args={"learning_rate": 2e-3 if fixed else 0.05, "max_grad_norm": 0.0})


@program("huggingface_lr_low", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), args={"learning_rate": 3e-3 if fixed else 1e-7})


class NeverStepped(torch.optim.lr_scheduler.LambdaLR):
    """Starts at zero; the trainer believes that it was stepped."""

    def step(self, epoch: Any = None) -> None:
        if not getattr(self, "_started", False):
            self._started = True
            super().step(epoch)


@program("huggingface_scheduler_never_stepped", "lr_too_low", also_ok=("lr_not_applied", "frozen_layers", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    kind = torch.optim.lr_scheduler.LambdaLR if fixed else NeverStepped
    scheduler = kind(optimizer, lambda step: min((step + 1) / 2000 if not fixed else (step + 1) / 20, 1.0))
    train(folder, model, corpus(), optimizers=(optimizer, scheduler))


@program("huggingface_decay_too_fast", "lr_decay_too_fast", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100 if fixed else 3, gamma=0.5)
    train(folder, model, corpus(), optimizers=(optimizer, scheduler))


# ----------------------------------------------------------------------------------------------------- optimizer


@program("huggingface_adam_epsilon", "adam_epsilon_dominates", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), args={"adam_epsilon": 1e-8 if fixed else 1.0})


@program("huggingface_clip_too_tight", "clip_too_tight", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, gpt(), corpus(),
        args={"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 1.0 if fixed else 1e-4},
    )  # fmt: skip


@program("huggingface_weight_decay", "over_regularisation", also_ok=("lr_too_low", "residual_decay", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), args={"weight_decay": 0.01 if fixed else 60.0, "max_steps": 200})


class ClearsEachMicroBatch(Trainer):
    def training_step(self, model: nn.Module, *args: Any, **given: Any) -> Tensor:
        model.zero_grad()
        return super().training_step(model, *args, **given)


@program("huggingface_zero_grad_between_micro_batches", "zero_grad_too_often", also_ok=("gradient_noise", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, gpt(), corpus(), kind=Trainer if fixed else ClearsEachMicroBatch,
        args={"gradient_accumulation_steps": 8, "per_device_train_batch_size": 2, "max_steps": 80},
    )  # fmt: skip


@program("huggingface_head_not_in_optimizer", "optimizer_missing_params", also_ok=STUCK, where="classifier")
def _(folder: Path, fixed: bool) -> None:
    model = bert()
    old = nn.Linear(48, 2)
    optimizer = torch.optim.AdamW([*model.bert.parameters(), *(model.classifier if fixed else old).parameters()], 1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    train(folder, model, sentences(), optimizers=(optimizer, scheduler))


# ------------------------------------------------------------------------------------------------- data and labels


@program("huggingface_duplicated", "data_duplication", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    few = texts(12).repeat(170, 1)
    data = corpus() if fixed else Items(input_ids=few, labels=few.clone())
    train(folder, gpt(), data, eval_dataset=corpus(128, 1), args=dict(max_steps=200, **EVALUATED))


class FirstBatchOnly(Trainer):
    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        return [next(iter(loader))] * 200


@program("huggingface_same_batch", "data_duplication", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, gpt(), corpus(), kind=Trainer if fixed else FirstBatchOnly, eval_dataset=corpus(128, 1),
        args=dict(EVALUATED),
    )  # fmt: skip


@program("huggingface_no_labels", "no_labels", also_ok=("nan_inf", "lr_not_applied", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    data = corpus()
    if not fixed:
        data.columns["labels"] = torch.full_like(data.columns["labels"], -100)
    train(folder, gpt(), data)


@program("huggingface_labels_shifted_twice", "wrong_label_shift", also_ok=("underfitting", "loss_plateau"))
def _(folder: Path, fixed: bool) -> None:
    tokens = texts(2048, length=25)
    data = Items(input_ids=tokens[:, :-1], labels=tokens[:, :-1] if fixed else tokens[:, 1:])
    train(folder, gpt(), data)


class OwnShift(Trainer):
    """Computes its loss from the logits and forgets to shift."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(input_ids=inputs["input_ids"])
        loss = nn.functional.cross_entropy(output.logits.reshape(-1, VOCABULARY), inputs["labels"].reshape(-1))
        return (loss, output) if return_outputs else loss


class OwnShiftFixed(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(input_ids=inputs["input_ids"])
        logits, labels = output.logits[:, :-1], inputs["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))
        return (loss, output) if return_outputs else loss


@program("huggingface_labels_not_shifted", "wrong_label_shift", also_ok=("attention_mask_leak",))
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), kind=OwnShiftFixed if fixed else OwnShift)


def padded(num: int, *, mask: bool, seed: int = 0) -> Items:
    tokens = texts(num, seed)
    lengths = torch.randint(4, 14, (num, 1), generator=torch.Generator().manual_seed(seed))
    is_text = torch.arange(tokens.shape[1]) < lengths
    tokens = torch.where(is_text, tokens, PAD)
    labels = torch.where(is_text, tokens, -100) if mask else tokens.clone()
    return Items(input_ids=tokens, attention_mask=is_text.long(), labels=labels)


@program("huggingface_padding_in_loss", "padding_in_loss", also_ok=("class_imbalance",))
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), padded(2048, mask=fixed))


@program("huggingface_shuffled_labels", "label_shuffling", also_ok=("overfitting", "underfitting"))
def _(folder: Path, fixed: bool) -> None:
    data = sentences(192)
    if not fixed:
        order = torch.randperm(192, generator=torch.Generator().manual_seed(3))
        data.columns["labels"] = data.columns["labels"][order]
    # The repaired one stops when it has learned: the fault is the labels, not the length.
    train(
        folder, bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), data, eval_dataset=sentences(256, 1),
        args=dict(learning_rate=1e-3, max_steps=60 if fixed else 240, **EVALUATED),
    )  # fmt: skip


@program("huggingface_overfitting", "overfitting")
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, gpt(n_embd=96), corpus(2048 if fixed else 48), eval_dataset=corpus(128, 1),
        args=dict(max_steps=200, **EVALUATED),
    )  # fmt: skip


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return None


@program("huggingface_sorted_by_class", "data_not_shuffled", also_ok=("loss_oscillation", "lr_too_high"))
def _(folder: Path, fixed: bool) -> None:
    data = sentences(480)
    order = data.columns["labels"].argsort()
    data.columns = {name: column[order] for name, column in data.columns.items()}
    train(
        folder, bert(), data, kind=Trainer if fixed else InOrder, eval_dataset=sentences(256, 1),
        args=dict(learning_rate=1e-3, **EVALUATED),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- model


@program("huggingface_frozen_body", "frozen_layers", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    model = gpt()
    if not fixed:
        model.transformer.requires_grad_(False)  # the head is tied to the embedding: only norms are left
        model.transformer.ln_f.requires_grad_(True)
    train(folder, model, corpus())


@program("huggingface_frozen_encoder", "frozen_layers", also_ok=STUCK, source="never pretrained, but frozen")
def _(folder: Path, fixed: bool) -> None:
    model = bert()
    if not fixed:
        model.bert.encoder.requires_grad_(False)
        model.bert.embeddings.requires_grad_(False)
    train(folder, model, sentences(), args={"learning_rate": 1e-3})


@program("huggingface_dropout", "excessive_dropout", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    p = 0.1 if fixed else 0.9
    train(
        folder, gpt(resid_pdrop=p, embd_pdrop=p, attn_pdrop=p), corpus(), eval_dataset=corpus(128, 1),
        args=dict(EVALUATED),
    )  # fmt: skip


class EvalMode(Trainer):
    def compute_loss(self, model: nn.Module, *args: Any, **given: Any) -> Any:
        model.eval()
        return super().compute_loss(model, *args, **given)


@program("huggingface_eval_mode", "eval_mode_training", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    train(folder, bert(), sentences(), kind=Trainer if fixed else EvalMode, args={"learning_rate": 1e-3})


class Halfway(nn.Module):
    """A classifier whose author detached the features to save memory."""

    def __init__(self, is_detached: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)
        self.is_detached = is_detached

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.body(self.embedding(input_ids).mean(1))
        logits = self.head(hidden.detach() if self.is_detached else hidden)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


@program("huggingface_detached", "detached_graph", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    train(folder, Halfway(not fixed), sentences())


class SoftmaxTwice(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(input_ids=inputs["input_ids"])
        loss = nn.functional.cross_entropy(output.logits.softmax(-1), inputs["labels"])
        return (loss, output) if return_outputs else loss


@program("huggingface_softmax_twice", "wrong_loss_activation_pair", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    train(folder, bert(), sentences(), kind=Trainer if fixed else SoftmaxTwice, args={"learning_rate": 1e-3})


# --------------------------------------------------------------------------------------------------------- precision


class Tiny(Trainer):
    """Divides the loss of a half-precision model by so much that its gradients vanish."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        loss = super().compute_loss(model, inputs, **given)
        return loss / 1e7


@program(
    "huggingface_fp16_all_zero", "low_precision_underflow", also_ok=("vanishing_gradients", "lr_not_applied", *STUCK)
)
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, gpt() if fixed else gpt().half(), corpus(), kind=Trainer if fixed else Tiny,
        args={"learning_rate": 3e-1, "optim": "sgd", "max_steps": 80},
    )  # fmt: skip


class Entropy(Trainer):
    """Adds p log p to the loss, which is NaN as soon as one p is zero."""

    factor = 4.0

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        loss, output = super().compute_loss(model, inputs, return_outputs=True, **given)
        p = torch.softmax(output.logits * 40 * (self.state.global_step > 40), -1)
        return loss + 1e-3 * (p * p.log()).sum(-1).mean()


@program("huggingface_nan_filtered", "nan_inf", also_ok=("lr_not_applied", "frozen_layers"))
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), kind=Trainer if fixed else Entropy)


# ----------------------------------------------------------------------------------------------------------- healthy


@program("h_huggingface_gpt")
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), eval_dataset=corpus(128, 1), args=dict(EVALUATED))


@program("h_huggingface_cosine")
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, gpt(n_layer=4, resid_pdrop=0.1), corpus(),
        args={"warmup_steps": 20, "lr_scheduler_type": "cosine", "weight_decay": 0.1, "max_steps": 200},
    )  # fmt: skip


@program("h_huggingface_short", source="40 steps, still falling")
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), args={"max_steps": 40, "learning_rate": 1e-3, "logging_steps": 1})


@program("h_huggingface_long_warmup", source="a warm-up of a third of a short run")
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), corpus(), args={"warmup_steps": 60})


@program("h_huggingface_accumulation")
def _(folder: Path, fixed: bool) -> None:
    train(
        folder,
        gpt(),
        corpus(),
        args={"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4, "max_steps": 100},
    )


@program("h_huggingface_bert_epochs", source="three epochs over a small set, evaluated after each")
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, bert(), sentences(800), eval_dataset=sentences(256, 1),
        args={"learning_rate": 5e-4, "max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch"},
    )  # fmt: skip


@program("h_huggingface_regression")
def _(folder: Path, fixed: bool) -> None:
    data = sentences()
    data.columns["labels"] = (data.columns["input_ids"] < VOCABULARY // 2).float().mean(1)
    train(folder, bert(num_labels=1, problem_type="regression"), data, args={"learning_rate": 5e-4})


class MaskedData(Items):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.columns["input_ids"][index]
        is_masked = torch.rand(tokens.shape) < 0.15
        return {
            "input_ids": torch.where(is_masked, 1, tokens),
            "labels": torch.where(is_masked, tokens, -100),
        }


@program("h_huggingface_masked_lm")
def _(folder: Path, fixed: bool) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    train(folder, BertForMaskedLM(config), MaskedData(input_ids=texts(2048)), args={"max_steps": 250})


@program("h_huggingface_t5", source="copies its input backwards")
def _(folder: Path, fixed: bool) -> None:
    config = T5Config(
        vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    tokens = texts(2048, length=8)
    data = Items(input_ids=tokens, labels=tokens.flip(1))
    train(folder, T5ForConditionalGeneration(config), data, args={"max_steps": 250})


class Weighted(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        output = model(input_ids=inputs["input_ids"])
        loss = nn.functional.cross_entropy(output.logits, inputs["labels"], weight=torch.tensor([1.0, 6.0]))
        return (loss, output) if return_outputs else loss


@program("h_huggingface_class_weights", source="one label in seven, weighted by six")
def _(folder: Path, fixed: bool) -> None:
    data = sentences(6000)
    labels = data.columns["labels"]
    keep = (labels == 0) | (torch.rand(len(labels), generator=torch.Generator().manual_seed(5)) < 1 / 6)
    train(
        folder, bert(), Items(**{name: column[keep] for name, column in data.columns.items()}), kind=Weighted,
        args={"learning_rate": 1e-3},
    )  # fmt: skip


@program("h_huggingface_head_on_trained_body", source="transfer learning: the body was trained before")
def _(folder: Path, fixed: bool) -> None:
    model = bert(hidden_dropout_prob=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for batch in itertools.islice(DataLoader(sentences(2048, 5), 32, shuffle=True), 60):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.bert.requires_grad_(False)
    nn.init.normal_(model.classifier.weight, std=0.02)
    train(folder, model, sentences(), args={"learning_rate": 3e-3})


@program("h_huggingface_bf16_weights")
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt().bfloat16(), corpus())


@program("h_huggingface_padded", source="padding is masked in labels")
def _(folder: Path, fixed: bool) -> None:
    train(folder, gpt(), padded(2048, mask=True, seed=4))


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= 90
        return control


@program("h_huggingface_stopped_early", source="a schedule for 1,000 steps, stopped after 90")
def _(folder: Path, fixed: bool) -> None:
    train(
        folder, gpt(), Subset(corpus(), range(1500)), callbacks=[Stop()],
        args={"max_steps": 1000, "warmup_steps": 30},
    )  # fmt: skip
