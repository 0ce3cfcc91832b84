"""Plain models made of layers in a row, and the ways to fill their weights. Names carry no hint of any fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

Fill = Callable[[Tensor], object]


def mlp(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.ReLU, *, norm: bool = False) -> nn.Sequential:
    """Linear layers with an activation between them, none after the last."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(sizes[:-1]):
        layers += [nn.Linear(wide, narrow), *([nn.BatchNorm1d(narrow)] if norm else []), activation()]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def cnn(
    channels: Sequence[int], hidden: int, classes: int, activation: Callable[[], nn.Module] = nn.ReLU, size: int = 8
) -> nn.Sequential:
    """Convolutions, each halving a (1, size, size) image, then two Linear layers."""
    layers: list[nn.Module] = []
    before = 1
    for after in channels:
        layers += [nn.Conv2d(before, after, 3, padding=1), activation(), nn.MaxPool2d(2)]
        before, size = after, size // 2
    layers += [nn.Flatten(), nn.Linear(before * size * size, hidden), activation(), nn.Linear(hidden, classes)]
    return nn.Sequential(*layers)


def fill(model: nn.Module, weights: Fill, biases: Fill = nn.init.zeros_) -> nn.Module:
    """Reinitialise every Linear and every convolution."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            weights(module.weight)
            if module.bias is not None:
                biases(module.bias)
    return model


def he(weight: Tensor) -> None:
    nn.init.kaiming_normal_(weight)


def xavier(weight: Tensor) -> None:
    nn.init.xavier_normal_(weight)


def normal(std: float) -> Fill:
    return lambda weight: nn.init.normal_(weight, 0.0, std)


def uniform(limit: float) -> Fill:
    return lambda weight: nn.init.uniform_(weight, -limit, limit)


def constant(value: float) -> Fill:
    return lambda weight: nn.init.constant_(weight, value)


class ResidualBlock(nn.Module):
    """y = skip * x + f(norm(x))."""

    def __init__(self, width: int, skip: float = 1.0, *, norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        branch: Tensor = self.down(self.act(self.up(self.norm(x))))
        return self.skip * x + branch


class AttentionBlock(nn.Module):
    """A pre-norm transformer block on nn.MultiheadAttention, causal."""

    def __init__(self, width: int, heads: int, skip: float = 1.0) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.ln1(x)
        x = self.skip * x + self.attn(h, h, h, attn_mask=mask, need_weights=False)[0]
        return self.skip * x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """A small causal transformer with learned positions."""

    def __init__(
        self, vocabulary: int = 24, length: int = 32, width: int = 48, layers: int = 2, skip: float = 1.0
    ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, 4, skip) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tok, self.pos):
            nn.init.normal_(embedding.weight, 0.0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))  # type: ignore[no-any-return]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over all positions; -100 is not scored."""
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100)
