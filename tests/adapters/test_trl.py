"""TRL's trainers, the real ones, with a tiny Llama and a tokenizer made here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sonde

pytest.importorskip("trl")
pytest.importorskip("datasets")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from sonde.adapters.transformers import SondeCallback

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

WORDS = ["the cat sat on the mat", "a dog ran in the park", "the sun is hot", "rain falls on a park"]


@pytest.fixture(scope="module")
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


class GradientNorms(TrainerCallback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        grad = dict(model.named_parameters())["model.norm.weight"].grad
        self.norms.append(grad.double().norm().item())


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


def sft(tokenizer: Any, folder: Any, callbacks: list[Any]) -> Any:
    data = Dataset.from_dict({"text": WORDS * 4})
    args = SFTConfig(**common(folder), max_length=16)
    return SFTTrainer(tiny(tokenizer), args=args, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)


def dpo(tokenizer: Any, folder: Any, callbacks: list[Any]) -> Any:
    data = Dataset.from_dict(
        {"prompt": ["the cat"] * 8, "chosen": [" sat on the mat"] * 8, "rejected": [" is hot rain"] * 8}
    )
    args = DPOConfig(**common(folder), max_length=16)
    return DPOTrainer(
        tiny(tokenizer),
        ref_model=tiny(tokenizer),
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def grpo(tokenizer: Any, folder: Any, callbacks: list[Any]) -> Any:
    data = Dataset.from_dict({"prompt": ["the cat"] * 8})
    args = GRPOConfig(**common(folder), num_generations=2, max_completion_length=4)
    return GRPOTrainer(
        tiny(tokenizer),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=callbacks,
    )


@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_true_gradients_and_untouched_losses(tmp_path, tokenizer, make):
    plain = make(tokenizer, tmp_path / "plain", [])
    plain.train()
    by_hand = GradientNorms()
    callback = SondeCallback(dir=tmp_path / "runs", project="trl", verbose=False)
    watched = make(tokenizer, tmp_path / "watched", [by_hand, callback])
    watched.train()
    run = sonde.open("latest", dir=tmp_path / "runs")
    assert run.status == "finished"
    table = run.stats("grad/model.norm.weight/norm")
    assert table["step"].to_pylist() == [0, 1, 2]
    np.testing.assert_allclose(table["value"].to_pylist(), by_hand.norms, rtol=1e-5)
    losses = [[e["loss"] for e in t.state.log_history if "loss" in e] for t in (plain, watched)]
    assert losses[0] == losses[1]
    assert run.scalars("loss")["value"].to_pylist() == losses[1]
