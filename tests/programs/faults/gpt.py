"""Small transformers for the programs: attention written out, fused, or torch's own; with a causal mask or without."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Self-attention with four projections. `fused` uses scaled_dot_product_attention."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        fused: bool = False,
        causal: bool = True,
        sees_ahead: int = 0,
        scale: float | None = None,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.fused, self.causal, self.sees_ahead = heads, fused, causal, sees_ahead
        self.scale = 1 / math.sqrt(width // heads) if scale is None else scale
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.query_norm: nn.Module = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()
        self.key_norm: nn.Module = nn.LayerNorm(width // heads) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        q, k = self.query_norm(self._split(self.query(x))), self.key_norm(self._split(self.key(x)))
        v = self._split(self.value(x))
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        else:
            y = self._mask(q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _mask(self, logits: Tensor) -> Tensor:
        if not self.causal:
            return logits
        after = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1 + self.sees_ahead)
        return logits.masked_fill(after, -math.inf)


class Block(nn.Module):
    """Pre-norm: attention, then a two-layer perceptron, both added to the stream."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, **options)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(
        self,
        vocabulary: int = 24,
        length: int = 32,
        *,
        width: int = 48,
        layers: int = 2,
        heads: int = 4,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, **options) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0, 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Any:
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    @property
    def attentions(self) -> list[Attention]:
        return [module for module in self.modules() if isinstance(module, Attention)]


class Encoder(nn.Module):
    """torch's own encoder over tokens; one output per token. Causal only on request."""

    def __init__(self, vocabulary: int = 24, length: int = 32, *, width: int = 48, causal: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.causal = causal

    def forward(self, x: Tensor) -> Any:
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        return self.head(self.encoder(h, mask=mask, is_causal=self.causal))


class Patches(nn.Module):
    """A vision transformer: attention over patches, in both directions."""

    def __init__(self, classes: int = 8, *, width: int = 40, size: int = 8) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn((size // 2) ** 2, width))
        self.block = Block(width, 4, causal=False, fused=True)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Any:
        h = self.block(self.cut(x).flatten(2).transpose(1, 2) + self.places)
        return self.head(self.norm(h).mean(1))
