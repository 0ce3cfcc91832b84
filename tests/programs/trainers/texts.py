"""Tiny data sets and models for the programs: texts from a Markov chain, sentences with a sentiment, points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

VOCABULARY = 48
PAD = 0
LENGTH = 24


class Items(Dataset):  # type: ignore[type-arg]
    """Columns of equal length, as a data set of dictionaries."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def texts(num: int, seed: int = 0, length: int = LENGTH) -> Tensor:
    """Sequences of a Markov chain over `VOCABULARY` tokens, each with four likely successors. Token 0 is padding."""
    chain = torch.Generator().manual_seed(7)
    successors = torch.randint(1, VOCABULARY, (VOCABULARY, 4), generator=chain)
    odds = torch.tensor([0.55, 0.25, 0.15, 0.05])
    g = torch.Generator().manual_seed(100 + seed)
    tokens = torch.empty(num, length, dtype=torch.int64)
    tokens[:, 0] = torch.randint(1, VOCABULARY, (num,), generator=g)
    for place in range(1, length):
        choice = torch.multinomial(odds, num, replacement=True, generator=g)
        tokens[:, place] = successors[tokens[:, place - 1], choice]
    return tokens


def corpus(num: int = 2048, seed: int = 0) -> Items:
    tokens = texts(num, seed)
    return Items(input_ids=tokens, labels=tokens.clone())


def sentences(num: int = 2048, seed: int = 0, length: int = 16) -> Items:
    """Random words; the label is whether more of them are from the first half of the vocabulary than not."""
    g = torch.Generator().manual_seed(200 + seed)
    lean = torch.rand(num, 1, generator=g)
    is_first = torch.rand(num, length, generator=g) < lean
    low = torch.randint(2, VOCABULARY // 2, (num, length), generator=g)
    high = torch.randint(VOCABULARY // 2, VOCABULARY, (num, length), generator=g)
    return Items(input_ids=torch.where(is_first, low, high), labels=(is_first.sum(1) * 2 > length).long())


def gpt(**changes: Any) -> GPT2LMHeadModel:
    given = {
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": PAD,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return GPT2LMHeadModel(GPT2Config(**{**given, **changes}))


def bert(**changes: Any) -> BertForSequenceClassification:
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "num_labels": 2,
        "pad_token_id": PAD,
    }
    return BertForSequenceClassification(BertConfig(**{**given, **changes}))
