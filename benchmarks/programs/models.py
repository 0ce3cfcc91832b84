"""The architectures of the generated programs: small, as a user would write them, with the options that faults turn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from programs.tasks import FEATURES, LENGTH, SIDE, VOCABULARY

ACTIVATIONS: Final = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU, "none": nn.Identity}


class Cut(nn.Module):
    """Passes its input on, without its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Mlp(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(
        self, outputs: int, width: int = 48, depth: int = 2, act: str = "relu", dropout: float = 0.0,
        norm: bool = False, narrow: int = 0, cut: bool = False, inputs: int = FEATURES,
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        before = inputs
        for i in range(depth):
            after = narrow if narrow and i == depth // 2 else width
            layers += [nn.Linear(before, after), *([nn.BatchNorm1d(after)] if norm else []), ACTIVATIONS[act]()]
            layers += [nn.Dropout(dropout)] if dropout else []
            before = after
        self.body = nn.Sequential(*layers)
        self.cut = Cut() if cut else nn.Identity()
        self.head = nn.Linear(before, outputs)
        if depth > 3 and not norm:  # PyTorch's own initialisation is too small for a deep stack
            for module in self.body:
                if isinstance(module, nn.Linear):
                    nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cut(self.body(x)))


class ResidualMlp(nn.Module):
    """Pre-norm residual blocks of two Linear layers."""

    def __init__(self, outputs: int, width: int = 32, depth: int = 4, act: str = "relu", skip: float = 1.0) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), ACTIVATIONS[act](), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.norm, self.head, self.skip = nn.LayerNorm(width), nn.Linear(width, outputs), skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            h = self.skip * h + block(norm(h))
        return self.head(self.norm(h))


class Mixture(nn.Module):
    """A mixture of experts: the best one or two of four, by a learned router, with a load-balancing term if asked."""

    def __init__(self, outputs: int, width: int = 32, top: int = 2, router_bias: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(4)
        )
        self.head, self.top = nn.Linear(width, outputs), top
        if router_bias:
            with torch.no_grad():
                self.router.bias[0] += router_bias

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.stem(x))
        weights, chosen = self.router(h).softmax(-1).topk(self.top, dim=-1)
        mixed = torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == i)
            if len(rows):
                mixed = mixed.index_add(0, rows, weights[rows, rank, None] * expert(h[rows]))
        return self.head(h + mixed)


class Cnn(nn.Module):
    """Two convolutions with pooling, then two Linear layers."""

    def __init__(
        self, outputs: int, channels: int = 8, act: str = "relu", dropout: float = 0.0, narrow: int = 0,
        cut: bool = False, norm: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, channels), (channels, 2 * channels)):
            layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else [])]
            layers += [ACTIVATIONS[act](), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.cut = Cut() if cut else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2 * channels * (SIDE // 4) ** 2, narrow or 32)
        self.act, self.head = ACTIVATIONS[act](), nn.Linear(narrow or 32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(self.features(x)).flatten(1)
        return self.head(self.dropout(self.act(self.fc(h))))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, skip: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        return functional.relu(self.skip * x + h)


class ResNet(nn.Module):
    """A stem and residual blocks with batch norm."""

    def __init__(
        self, outputs: int, channels: int = 8, depth: int = 2, skip: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.layers = nn.Sequential(*(ResidualBlock(channels, skip) for _ in range(depth)))
        self.pool, self.dropout = nn.AdaptiveAvgPool2d(4), nn.Dropout(dropout)
        self.head = nn.Linear(16 * channels, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.pool(self.layers(self.stem(x))).flatten(1)))


class UNet(nn.Module):
    """Down, up, and a connection across: one output per pixel."""

    def __init__(
        self, outputs: int, channels: int = 8, act: str = "relu", dropout: float = 0.0, cut: bool = False
    ) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.merge, self.head = nn.Conv2d(2 * channels, channels, 3, padding=1), nn.Conv2d(channels, outputs, 1)
        self.act1, self.act2, self.act3 = (ACTIVATIONS[act]() for _ in range(3))
        self.dropout, self.cut = nn.Dropout(dropout), Cut() if cut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        wide = self.act1(self.down1(x))
        deep = self.dropout(self.act2(self.down2(functional.max_pool2d(wide, 2))))
        return self.head(self.act3(self.merge(self.cut(torch.cat([wide, self.up(deep)], 1)))))


class AutoEncoder(nn.Module):
    """Narrow in the middle on purpose."""

    def __init__(self, outputs: int, code: int = 4, width: int = 32, act: str = "relu", cut: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), ACTIVATIONS[act](), nn.Linear(width, code))
        self.cut = Cut() if cut else nn.Identity()
        self.decoder = nn.Sequential(nn.Linear(code, width), ACTIVATIONS[act](), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.cut(self.encoder(x)))


class Variational(nn.Module):
    """An autoencoder with a Gaussian code."""

    def __init__(self, outputs: int, code: int = 4, width: int = 32, act: str = "relu") -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), ACTIVATIONS[act]())
        self.mean, self.log_var = nn.Linear(width, code), nn.Linear(width, code)
        self.decoder = nn.Sequential(nn.Linear(code, width), ACTIVATIONS[act](), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(x)
        mean, log_var = self.mean(h), self.log_var(h)
        code = mean + torch.randn_like(mean) * (0.5 * log_var).exp() if self.training else mean
        return self.decoder(code), mean, log_var


class Recurrent(nn.Module):
    """Embedding (for tokens), a recurrent cell, and a head on the last state or on every state."""

    def __init__(
        self,
        outputs: int,
        cell: str = "lstm",
        width: int = 32,
        tokens: bool = True,
        every: bool = False,
        cut: bool = False,
    ) -> None:
        super().__init__()
        self.embed: nn.Module = nn.Embedding(VOCABULARY, 16) if tokens else nn.Linear(1, 16)
        self.cell = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}[cell](16, width, batch_first=True)
        self.cut = Cut() if cut else nn.Identity()
        self.head, self.every = nn.Linear(width, outputs), every

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(self.embed(x))
        return self.head(self.cut(states if self.every else states[:, -1]))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, ahead: int, scale: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.causal, self.ahead, self.scale = heads, causal, ahead, scale / math.sqrt(width // heads)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            after = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + self.ahead)
            scores = scores.masked_fill(after, -math.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer block, norm before or after."""

    def __init__(self, width: int, post: bool, skip: float, dropout: float, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, 4, **attention)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.post, self.skip, self.dropout = post, skip, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.norm1(self.skip * x + self.dropout(self.attn(x)))
            return self.norm2(self.skip * x + self.dropout(self.mlp(x)))
        x = self.skip * x + self.dropout(self.attn(self.norm1(x)))
        return self.skip * x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Tokens, series or image patches in; one output per position, or one for all."""

    def __init__(
        self, outputs: int, inputs: str = "tokens", every: bool = False, causal: bool = False, width: int = 32,
        depth: int = 2, post: bool = False, skip: float = 1.0, ahead: int = 0, scale: float = 1.0, dropout: float = 0.0,
        cut: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        makers: dict[str, Callable[[], nn.Module]] = {
            "tokens": lambda: nn.Embedding(VOCABULARY, width),
            "series": lambda: nn.Linear(1, width),
            "image": lambda: nn.Conv2d(1, width, 2, stride=2),
        }
        self.embed, self.is_image, self.every = makers[inputs](), inputs == "image", every
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        options = {"causal": causal, "ahead": ahead, "scale": scale}
        self.blocks = nn.ModuleList(Block(width, post, skip, dropout, **options) for _ in range(depth))
        self.norm: nn.Module = nn.Identity() if post else nn.LayerNorm(width)
        self.cut, self.head = Cut() if cut else nn.Identity(), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = (h.flatten(2).transpose(1, 2) if self.is_image else h) + self.positions[
            : LENGTH if self.is_image else x.shape[1]
        ]
        for block in self.blocks:
            h = block(h)
        h = self.cut(self.norm(h))
        return self.head(h if self.every else h.mean(1))


class Recommender(nn.Module):
    """Two tables of embeddings, and a small network over both."""

    def __init__(
        self, outputs: int, width: int = 16, act: str = "relu", dropout: float = 0.0, cut: bool = False
    ) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, width), nn.Embedding(40, width)
        self.mlp = nn.Sequential(
            nn.Linear(3 * width, 32), ACTIVATIONS[act](), nn.Dropout(dropout), nn.Linear(32, outputs)
        )
        self.cut = Cut() if cut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        user, item = self.users(x[:, 0]), self.items(x[:, 1])
        return self.mlp(self.cut(torch.cat([user, item, user * item], -1)))


class Siamese(nn.Module):
    """One encoder for both views; similarities within the batch, divided by a temperature."""

    def __init__(
        self, outputs: int, width: int = 48, act: str = "relu", temperature: float = 0.1, cut: bool = False
    ) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, width), ACTIVATIONS[act](), nn.Linear(width, 16))
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / temperature)))
        self.cut = Cut() if cut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        first, second = (functional.normalize(self.cut(self.encoder(x[:, i])), dim=-1) for i in (0, 1))
        return self.log_scale.exp() * first @ second.T


class LoraLinear(nn.Module):
    """A frozen Linear and a low-rank correction."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, zero: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank
        if zero:
            nn.init.zeros_(self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * (x @ self.lora_A.T @ self.lora_B.T)


def adapted(model: nn.Module, names: tuple[str, ...], rank: int, alpha: float, zero: bool) -> nn.Module:
    """The same model with every weight frozen but the adapters, and its head."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (
                isinstance(child, nn.Linear)
                and (name in names or names == ("*",))
                and child is not getattr(model, "head", None)
            ):
                setattr(module, name, LoraLinear(child, rank, alpha, zero))
    return model


@dataclass(frozen=True)
class Architecture:
    """A model family, the tasks it can learn, and the learning rates it likes."""

    name: str
    tasks: tuple[str, ...]
    make: Callable[..., nn.Module]
    """(task, **options) -> model"""
    options: frozenset[str] = frozenset()
    """The options that a fault may turn."""
    rate: float = 1.0
    """A factor on the optimizer's usual learning rate."""
    adaptive: bool = False
    """Whether plain SGD is too slow for it."""


ARCHITECTURES: Final[dict[str, Architecture]] = {}


def _architecture(name: str, tasks: str, make: Any, options: str = "", **more: Any) -> None:
    ARCHITECTURES[name] = Architecture(name, tuple(tasks.split()), make, frozenset(options.split()), **more)


def _of(kind: type[nn.Module], **fixed: Any) -> Callable[..., nn.Module]:
    return lambda task, **options: kind(task.outputs, **{**fixed, **options})


def _sequence(kind: type[nn.Module], **fixed: Any) -> Callable[..., nn.Module]:
    def make(task: Any, **options: Any) -> nn.Module:
        every = task.name in ("language", "tagging")
        by_kind = {"inputs": task.inputs} if kind is Transformer else {"tokens": task.inputs == "tokens"}
        return kind(task.outputs, **{"every": every, **by_kind, **fixed, **options})

    return make


def _lora(make: Callable[..., nn.Module], *names: str) -> Callable[..., nn.Module]:
    def build(task: Any, rank: int = 4, alpha: float = 8.0, zero: bool = False, **options: Any) -> nn.Module:
        return adapted(make(task, **options), names, rank, alpha, zero)

    return build


_VECTOR = "regression binary multiclass imbalanced"
_architecture("mlp", f"{_VECTOR} policy", _of(Mlp), "act dropout narrow cut width")
_architecture("deep_mlp", "regression binary multiclass", _of(Mlp, depth=6, width=32), "act dropout narrow cut width")
_architecture("normed_mlp", f"{_VECTOR}", _of(Mlp, depth=3, norm=True, dropout=0.1), "act dropout narrow cut")
_architecture("residual_mlp", f"{_VECTOR} policy", _of(ResidualMlp), "act skip", rate=0.5)
_architecture("mixture", "regression multiclass", _of(Mixture), "router_bias top")
_architecture("cnn", "images localisation", _of(Cnn), "act dropout narrow cut")
_architecture("normed_cnn", "images localisation", _of(Cnn, norm=True), "act dropout narrow cut")
_architecture("resnet", "images localisation", _of(ResNet), "skip dropout", rate=0.5)
_architecture("vit", "images localisation", _sequence(Transformer), "skip dropout scale cut", rate=1.2, adaptive=True)
_architecture("unet", "segmentation", _of(UNet), "act dropout cut")
_architecture("autoencoder", "reconstruction", _of(AutoEncoder), "act cut code", adaptive=True)
_architecture("variational", "generation", _of(Variational), "act code", adaptive=True)
_architecture("rnn", "recall forecast tagging", _sequence(Recurrent, cell="rnn"), "cut", adaptive=True)
_architecture("gru", "recall forecast tagging", _sequence(Recurrent, cell="gru"), "cut", rate=2.0, adaptive=True)
_architecture("lstm", "recall forecast language", _sequence(Recurrent, cell="lstm"), "cut", rate=2.0, adaptive=True)
_architecture(
    "encoder", "recall tagging forecast", _sequence(Transformer), "skip dropout scale cut", rate=0.6, adaptive=True
)
_architecture(
    "decoder", "language", _sequence(Transformer, causal=True), "skip dropout scale ahead cut", rate=0.6, adaptive=True
)
_architecture(
    "post_norm", "language tagging", _sequence(Transformer, causal=True, post=True, depth=5, width=24),
    "skip dropout scale cut",
    rate=0.3, adaptive=True,
)  # fmt: skip
_architecture("recommender", "ratings clicks", _of(Recommender), "act dropout cut", rate=4.0, adaptive=True)
_architecture("siamese", "contrastive", _of(Siamese), "act temperature cut")
_architecture("lora_mlp", "regression multiclass", _lora(_of(Mlp), "*"), "rank alpha zero", adaptive=True)
_architecture(
    "lora_decoder", "language", _lora(_sequence(Transformer, causal=True), "q_proj", "v_proj", "0", "2"),
    "rank alpha zero",
    adaptive=True,
)  # fmt: skip
