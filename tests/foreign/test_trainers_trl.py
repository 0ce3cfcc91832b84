"""TRL's trainers: SFT, DPO, GRPO, with a tiny Llama and a tokenizer that is made here."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from test_trainers_transformers import callbacks_of, keep, listen, settings
from trial import Trial, trainer

WHO, DID, WHERE = (
    ["cat", "dog", "bird", "fish", "horse", "cow"],
    ["sat", "ran", "slept", "ate", "jumped", "sang"],
    ["house", "park", "field", "river", "barn", "hill"],
)


def sentences(num: int, seed: int = 0) -> list[str]:
    """Who did what where: each animal has its own place."""
    drawn = random.Random(seed)
    return [
        f"the {WHO[who]} {drawn.choice(DID)} in the {WHERE[who]}" for who in (drawn.randrange(6) for _ in range(num))
    ]


def other(text: str) -> str:
    """Another place for each: something new to learn."""
    place = text.rsplit(maxsplit=1)[-1]
    return WHERE[(WHERE.index(place) + 1) % len(WHERE)]


@cache
def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(
        sentences(200), trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "<s>", "</s>"])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def llama(layers: int = 2) -> Any:
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    return LlamaForCausalLM(config)


@cache
def learned() -> dict[str, torch.Tensor]:
    """Weights that know the sentences: adapters are for models that were trained before."""
    state = torch.get_rng_state()
    torch.manual_seed(5)
    model, words = llama(), tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.tensor([words.encode(text) for text in sentences(32 * 60, 7)]).split(32)
    for ids in rows:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    torch.set_rng_state(state)
    return model.state_dict()


def pretrained() -> Any:
    model = llama()
    model.load_state_dict(learned())
    return model


def common(**given: Any) -> dict[str, Any]:
    return settings(**{"bf16": False, "gradient_checkpointing": False, **given})


def fit(trial: Trial, made: Any) -> None:
    listen(made)
    made.train()
    keep(trial, made)


@trainer("TRL SFT", is_quick=True)
def sft(trial: Trial) -> None:
    made = SFTTrainer(
        llama(),
        args=SFTConfig(**common(), max_length=16),
        train_dataset=Dataset.from_dict({"text": sentences(320)}),
        processing_class=tokenizer(),
        callbacks=callbacks_of(trial),
    )
    fit(trial, made)


@trainer("TRL SFT on completions, with LoRA")
def sft_lora(trial: Trial) -> None:
    from peft import LoraConfig

    rows = [text.partition(" in ") for text in sentences(320)]
    made = SFTTrainer(
        pretrained(),
        args=SFTConfig(**common(learning_rate=2e-3), max_length=24, completion_only_loss=True),
        train_dataset=Dataset.from_dict(
            {"prompt": [row[0] for row in rows], "completion": [" in the " + other(row[2]) for row in rows]}
        ),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
        callbacks=callbacks_of(trial),
    )
    fit(trial, made)


@trainer("TRL SFT, its own defaults")
def sft_defaults(trial: Trial) -> None:
    """bfloat16 and gradient checkpointing, as it comes."""
    given = {k: v for k, v in common().items() if k not in ("bf16", "gradient_checkpointing")}
    made = SFTTrainer(
        llama(),
        args=SFTConfig(**given, max_length=16),
        train_dataset=Dataset.from_dict({"text": sentences(320)}),
        processing_class=tokenizer(),
        callbacks=callbacks_of(trial),
    )
    fit(trial, made)


def preferences(num: int) -> Dataset:
    """The right place is preferred to a wrong one."""
    drawn = random.Random(1)
    rows = [text.partition(" in the ") for text in sentences(num, 1)]
    wrong = [drawn.choice([place for place in WHERE if place != row[2]]) for row in rows]
    return Dataset.from_dict(
        {
            "prompt": [row[0] + " in the" for row in rows],
            "chosen": [" " + row[2] for row in rows],
            "rejected": [" " + place for place in wrong],
        }
    )


@trainer("TRL DPO", is_quick=True)
def dpo(trial: Trial) -> None:
    model = llama()
    reference = llama()
    reference.load_state_dict(model.state_dict())
    made = DPOTrainer(
        model,
        ref_model=reference,
        args=DPOConfig(**common(learning_rate=1e-3), max_length=16),
        train_dataset=preferences(320),
        processing_class=tokenizer(),
        callbacks=callbacks_of(trial),
    )
    fit(trial, made)


@trainer("TRL DPO with LoRA, the reference is the model without it")
def dpo_lora(trial: Trial) -> None:
    from peft import LoraConfig

    made = DPOTrainer(
        pretrained(),
        args=DPOConfig(**common(learning_rate=1e-3, gradient_accumulation_steps=2, max_steps=20), max_length=16),
        train_dataset=preferences(320),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
        callbacks=callbacks_of(trial),
    )
    fit(trial, made)


def about_birds(completions: list[str], **_: Any) -> list[float]:
    return [sum(word in ("barn", "bird", "sang") for word in text.split()) / 4 for text in completions]


@trainer("TRL GRPO", is_quick=True)
def grpo(trial: Trial) -> None:
    made = GRPOTrainer(
        llama(1),
        reward_funcs=about_birds,
        args=GRPOConfig(
            **common(max_steps=25, learning_rate=5e-3), num_generations=8, max_completion_length=4, beta=0.0
        ),
        train_dataset=Dataset.from_dict({"prompt": sentences(64)}),
        processing_class=tokenizer(),
        callbacks=callbacks_of(trial),
    )
    fit(trial, made)


@trainer("TRL GRPO, two passes over each batch, KL penalty")
def grpo_twice(trial: Trial) -> None:
    llama(1).save_pretrained("before")  # the reference is read from where the model came from
    made = GRPOTrainer(
        "before",
        reward_funcs=about_birds,
        args=GRPOConfig(
            **common(max_steps=20, learning_rate=5e-3),
            num_generations=8,
            num_iterations=2,
            max_completion_length=4,
            beta=0.04,
        ),
        train_dataset=Dataset.from_dict({"prompt": sentences(64)}),
        processing_class=tokenizer(),
        callbacks=callbacks_of(trial),
    )
    fit(trial, made)


@pytest.mark.parametrize("program", trainer.of(__name__))
def test_trainer(program: Any, tmp_path: Path) -> None:
    program.examine(tmp_path).check()
