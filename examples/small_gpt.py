"""A small character GPT in plain PyTorch, trained on text that ships with every Python. Does not use sonde."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB_SIZE = 256
# Modules with long docstrings: prose and code, about a megabyte, identical for every installation of a Python version.
TEXTS = ("argparse", "ast", "asyncio/base_events", "datetime", "decimal", "difflib", "doctest", "inspect", "optparse",
         "pathlib", "pickle", "shutil", "statistics", "subprocess", "tarfile", "textwrap", "typing",
         "zipfile")  # fmt: skip


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, dim = x.shape
        q, k, v = self.qkv(x).view(batch, context, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, context, dim))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and with a residual connection."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SmallGPT(nn.Module):
    """Takes characters, returns the loss of predicting the next ones."""

    def __init__(self, *, num_layers: int = 4, dim: int = 256, num_heads: int = 8, context: int = 128) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, dim)
        self.position = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCAB_SIZE, bias=False)
        self.apply(_init)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def load_text() -> Tensor:
    """The source code of some standard-library modules, as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = [library / f"{name}.py" for name in TEXTS]
    data = b"".join(path.read_bytes() for path in sources if path.exists())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def next_batch(text: Tensor, *, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of the text and the same pieces one character later."""
    starts = torch.randint(len(text) - context - 1, (batch,), generator=generator)
    pieces = text[starts[:, None] + torch.arange(context + 1)]
    return pieces[:, :-1], pieces[:, 1:]
