"""TRL's trainers, the real ones, with a tiny Llama and a tokenizer made here."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from sonde.adapters.transformers import SondeCallback
from sonde.testing.adapters import TruthTests
from sonde.testing.by_hand import Recipe, gradients_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

WORDS = ["the cat sat on the mat", "a dog ran in the park", "the sun is hot", "rain falls on a park"]


@cache
def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(WORDS, trainers.WordLevelTrainer(special_tokens=["<unk>", "<pad>", "<s>", "</s>"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def tiny(tokenizer: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config)


class Seen(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: list[Any] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        self.gradients.append(gradients_of(model))


def common(folder: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }


class TRLTests(TruthTests):
    recipe = Recipe(num_steps=3)

    def trainer(self, net: Any, callbacks: list[Any]) -> Any:
        raise NotImplementedError

    def net(self, error: BaseException | None = None) -> Any:
        return tiny(tokenizer())

    def recorder(self, **options: Any) -> Any:
        return SondeCallback(**options)

    def train(self, net: Any, recorder: Any, *others: Any) -> list[float]:
        trainer = self.trainer(net, [*others, *([recorder] if recorder else [])])
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def by_hand(self) -> Any:
        seen = Seen()
        torch.manual_seed(3)
        return self.train(self.net(), None, seen), seen.gradients

    def raw_norms(self) -> Any:
        return []


class TestSFT(TRLTests):
    def trainer(self, net, callbacks):
        return SFTTrainer(
            net,
            args=SFTConfig(**common(Path.cwd()), max_length=16),
            train_dataset=Dataset.from_dict({"text": WORDS * 4}),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )


class TestDPO(TRLTests):
    def trainer(self, net, callbacks):
        pairs = {"prompt": ["the cat"] * 8, "chosen": [" sat on the mat"] * 8, "rejected": [" is hot rain"] * 8}
        return DPOTrainer(
            net,
            ref_model=tiny(tokenizer()),
            args=DPOConfig(**common(Path.cwd()), max_length=16),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )


class TestGRPO(TRLTests):
    def trainer(self, net, callbacks):
        return GRPOTrainer(
            net,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=GRPOConfig(**common(Path.cwd()), num_generations=2, max_completion_length=4),
            train_dataset=Dataset.from_dict({"prompt": ["the cat"] * 8}),
            processing_class=tokenizer(),
            callbacks=callbacks,
        )
