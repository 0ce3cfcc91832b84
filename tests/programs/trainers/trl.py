"""Programs in TRL's trainers, with PEFT and without."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from sonde.adapters.transformers import SondeCallback
from trainers.program import program
from trainers.texts import corpus, texts

STUCK = ("underfitting", "loss_plateau", "constant_output")
WORDS = ["<pad>", "</s>", *(f"w{number}" for number in range(46))]


@cache
def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="w0", pad_token="<pad>", eos_token="</s>", bos_token="</s>"
    )


def llama(seed: int = 3, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    given = {
        "vocab_size": 48,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**given, **changes}))


@cache
def _pretrained_weights() -> dict[str, Any]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    data = DataLoader(corpus(2048, 9), 32, shuffle=True)
    for batch in [*data, *data]:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def pretrained(**changes: Any) -> LlamaForCausalLM:
    """Knows the language of `texts`, and is to learn another task in it."""
    weights = _pretrained_weights()
    model = llama(**changes)
    model.load_state_dict(weights)
    return model


def spoken(tokens: Any) -> list[str]:
    return [" ".join(WORDS[int(token)] for token in row) for row in tokens]


def prose(num: int = 1500, seed: int = 0, length: int = 20) -> Dataset:
    """Texts over another order of the vocabulary: the successors of a token are shifted."""
    return Dataset.from_dict({"text": spoken((texts(num, seed, length) * 5 + 1) % 46 + 2)})


def answers(num: int = 1200, seed: int = 0, length: int = 10) -> Dataset:
    """Prompts with a completion: the same words backwards."""
    tokens = texts(num, seed, length).clamp(2, 47)
    return Dataset.from_dict({"prompt": spoken(tokens), "completion": [" " + text for text in spoken(tokens.flip(1))]})


def preferences(num: int = 800, seed: int = 0) -> Dataset:
    """Completions that continue with low words are preferred."""
    g = torch.Generator().manual_seed(seed)
    prompt = texts(num, seed, 6).clamp(2, 47)
    low, high = (torch.randint(2 + 20 * place, 24 + 20 * place, (num, 5), generator=g) for place in (0, 1))
    return Dataset.from_dict(
        {
            "prompt": spoken(prompt),
            "chosen": [" " + text for text in spoken(low)],
            "rejected": [" " + text for text in spoken(high)],
        }
    )


def shared(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    given = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "max_steps": 120,
        "learning_rate": 2e-3,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return {**given, **changes}


def ours(folder: Path) -> SondeCallback:
    return SondeCallback(project="trainers", dir=str(folder), verbose=False)


def sft(folder: Path, model: Any, data: Dataset, *, peft: Any = None, evaluated: Any = None, **changes: Any) -> None:
    args = SFTConfig(**shared(folder, dict(max_length=32, **changes)))
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=data, eval_dataset=evaluated, processing_class=tokenizer(),
        peft_config=peft, callbacks=[ours(folder)],
    )  # fmt: skip
    trainer.train()


def lora(**changes: Any) -> LoraConfig:
    given = {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
    }
    return LoraConfig(**{**given, **changes})


# ------------------------------------------------------------------------------------------------------------- SFT


@program("trl_sft_lr_high", "lr_too_high", also_ok=("loss_oscillation", "attention_logit_growth", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    sft(folder, llama(), prose(), learning_rate=3e-3 if fixed else 0.3)


@program("trl_sft_warmup_never_ends", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    sft(folder, llama(), prose(), warmup_steps=10 if fixed else 50_000, lr_scheduler_type="cosine")


@program("trl_sft_answers_masked", "no_labels", also_ok=("nan_inf", "lr_not_applied", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    class Masking(DataCollatorForLanguageModeling):
        """Looks for a marker that the tokenizer splits differently, and masks everything before it: all."""

        def torch_call(self, examples: Any) -> Any:
            batch = super().torch_call(examples)
            batch["labels"][:] = -100
            return batch

    kind = DataCollatorForLanguageModeling if fixed else Masking
    config = SFTConfig(**shared(folder, {"max_length": 32}))
    trainer = SFTTrainer(
        model=llama(), args=config, train_dataset=prose(), processing_class=tokenizer(), callbacks=[ours(folder)],
        data_collator=kind(pad_token_id=0),
    )  # fmt: skip
    trainer.train()


@program("trl_sft_duplicates", "data_duplication", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    data = prose() if fixed else prose(16).select([number % 16 for number in range(1500)])
    sft(folder, llama(), data, evaluated=prose(128, 1), eval_strategy="steps", eval_steps=20, max_steps=160)


@program("trl_sft_overfitting", "overfitting", also_ok=("data_duplication",))
def _(folder: Path, fixed: bool) -> None:
    sft(
        folder, llama(), prose(1500 if fixed else 40), evaluated=prose(128, 1), eval_strategy="steps", eval_steps=20,
        max_steps=200, learning_rate=3e-3,
    )  # fmt: skip


@program("trl_sft_adam_epsilon", "adam_epsilon_dominates", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    sft(folder, llama(), prose(), adam_epsilon=1e-8 if fixed else 0.1)


@program("trl_sft_frozen", "frozen_layers", also_ok=STUCK, source="layers 0 and 1 of a fresh model")
def _(folder: Path, fixed: bool) -> None:
    model = llama()
    if not fixed:
        model.model.layers.requires_grad_(False)
    sft(folder, model, prose(), max_steps=160, learning_rate=3e-3)


@program("h_trl_sft")
def _(folder: Path, fixed: bool) -> None:
    sft(folder, llama(), prose(), evaluated=prose(128, 1), eval_strategy="steps", eval_steps=40)


@program("h_trl_sft_packed")
def _(folder: Path, fixed: bool) -> None:
    sft(folder, llama(), prose(1500, 2), packing=True, learning_rate=3e-3)


@program("h_trl_sft_completion_only")
def _(folder: Path, fixed: bool) -> None:
    sft(folder, pretrained(), answers(), completion_only_loss=True, learning_rate=3e-3, gradient_accumulation_steps=2)


# ------------------------------------------------------------------------------------------------------------- LoRA


@program("peft_lr_high", "lr_too_high", also_ok=("loss_oscillation", "exploding_gradients", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    sft(folder, pretrained(), prose(), peft=lora(), learning_rate=5e-3 if fixed else 1.0)


@program("peft_scale_too_large", "lora_scale_too_large", also_ok=("lr_too_high", "loss_oscillation", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    sft(folder, pretrained(), prose(), peft=lora(lora_alpha=16 if fixed else 2048), learning_rate=5e-3)


@program("peft_rank_one", "lora_rank_too_low", also_ok=("underfitting", "lr_too_low"))
def _(folder: Path, fixed: bool) -> None:
    sft(
        folder, pretrained(), prose(), peft=lora(r=16 if fixed else 1, lora_alpha=32 if fixed else 2),
        learning_rate=1e-2, max_steps=250,
    )  # fmt: skip


@program("peft_lr_low", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    sft(folder, pretrained(), prose(), peft=lora(), learning_rate=5e-3 if fixed else 1e-7)


@program("peft_both_zero", "lora_zero_init", also_ok=("lr_not_applied", "detached_graph", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    model = get_peft_model(pretrained(), lora())
    if not fixed:
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                torch.nn.init.zeros_(parameter)
    sft(folder, model, prose(), learning_rate=5e-3)


@program("h_peft_lora")
def _(folder: Path, fixed: bool) -> None:
    sft(folder, pretrained(), prose(), peft=lora(), learning_rate=5e-3, evaluated=prose(128, 1), eval_strategy="steps",
        eval_steps=30)  # fmt: skip


@program("h_peft_rslora_high_rank")
def _(folder: Path, fixed: bool) -> None:
    sft(folder, pretrained(), prose(), peft=lora(r=24, use_rslora=True), learning_rate=3e-3, max_steps=160)


@program("h_peft_same_language", source="almost nothing to learn")
def _(folder: Path, fixed: bool) -> None:
    data = Dataset.from_dict({"text": spoken(texts(1500, 4, 20))})
    sft(folder, pretrained(), data, peft=lora(), learning_rate=1e-3)


@program("h_peft_warmup_cosine")
def _(folder: Path, fixed: bool) -> None:
    sft(folder, pretrained(), prose(), peft=lora(lora_dropout=0.1), learning_rate=1e-2, warmup_steps=12,
        lr_scheduler_type="cosine")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- DPO


def dpo(folder: Path, model: Any, *, peft: Any = None, **changes: Any) -> None:
    args = DPOConfig(**shared(folder, dict(max_length=24, learning_rate=3e-4, max_steps=80, **changes)))
    trainer = DPOTrainer(
        model=model,
        ref_model=None if peft else pretrained(),
        args=args,
        train_dataset=preferences(),
        eval_dataset=preferences(64, 1),
        processing_class=tokenizer(),
        peft_config=peft,
        callbacks=[ours(folder)],
    )
    trainer.train()


@program("trl_dpo_lr_high", "lr_too_high", also_ok=("loss_oscillation", "loss_spikes", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    args = DPOConfig(**shared(folder, {"max_length": 24, "learning_rate": 3e-4 if fixed else 0.3, "max_steps": 80}))
    trainer = DPOTrainer(
        model=pretrained(), ref_model=pretrained(), args=args, train_dataset=preferences(),
        processing_class=tokenizer(), callbacks=[ours(folder)],
    )  # fmt: skip
    trainer.train()


@program("h_trl_dpo")
def _(folder: Path, fixed: bool) -> None:
    dpo(folder, pretrained(), eval_strategy="steps", eval_steps=20)


@program("h_trl_dpo_lora")
def _(folder: Path, fixed: bool) -> None:
    args = {"learning_rate": 2e-3, "beta": 0.3}
    config = DPOConfig(**shared(folder, dict(max_length=24, max_steps=80, **args)))
    trainer = DPOTrainer(
        model=pretrained(), args=config, train_dataset=preferences(), processing_class=tokenizer(),
        peft_config=lora(), callbacks=[ours(folder)],
    )  # fmt: skip
    trainer.train()


@program("h_trl_reward")
def _(folder: Path, fixed: bool) -> None:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(3)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=48,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
            num_labels=1,
        )
    )
    args = RewardConfig(**shared(folder, {"max_length": 24, "learning_rate": 1e-3, "max_steps": 80}))
    trainer = RewardTrainer(
        model=model, args=args, train_dataset=preferences(), processing_class=tokenizer(), callbacks=[ours(folder)]
    )
    trainer.train()
