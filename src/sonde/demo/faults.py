"""The faults of `sonde demo`. Each has the line of code that is wrong, and the line that repairs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sonde.demo.training import NUM_CLASSES, NUM_FEATURES, Training, batches, clusters, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One planted fault."""

    rule: str
    """The finding that sonde puts first: the root cause."""
    story: str
    wrong: str
    right: str
    build: Callable[[bool], Training]
    """Makes the training: with the fault, or repaired."""

    def training(self, *, is_repaired: bool) -> Training:
        """The training, the same every time."""
        torch.manual_seed(0)
        return self.build(is_repaired)


def stack(widths: list[int], activation: Callable[[], nn.Module], init: Callable[[Tensor], object]) -> nn.Sequential:
    """Linear layers with activations in between; all biases are 0."""
    layers: list[nn.Module] = []
    for wide, narrow in pairwise(widths):
        linear = nn.Linear(wide, narrow)
        init(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def he(weight: Tensor) -> None:
    nn.init.kaiming_normal_(weight, nonlinearity="relu")


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def vanishing(is_repaired: bool) -> Training:
    widths = [NUM_FEATURES, *[24] * 9, NUM_CLASSES]
    model = stack(widths, nn.GELU, he) if is_repaired else stack(widths, nn.Sigmoid, nn.init.xavier_normal_)
    return Training(model=model, optimizer=adam(model, 1e-3), batches=batches(clusters(1200)), num_steps=300)


def exploding(is_repaired: bool) -> Training:
    def init(weight: Tensor) -> None:
        he(weight)
        weight.data.mul_(1.0 if is_repaired else 4.0)

    model = stack([NUM_FEATURES, *[48] * 5, NUM_CLASSES], nn.ReLU, init)
    return Training(model=model, optimizer=adam(model, 1e-3), batches=batches(clusters(1200)), num_steps=300)


def dead_relu(is_repaired: bool) -> Training:
    model = stack([NUM_FEATURES, 64, 64, NUM_CLASSES], nn.ReLU, he)
    if not is_repaired:
        nn.init.constant_(model[2].bias, -8.0)  # type: ignore[arg-type]
    return Training(model=model, optimizer=sgd(model, 0.02), batches=batches(clusters(1200)), num_steps=300)


def spike(is_repaired: bool) -> Training:
    def schedule(step: int) -> float:
        return 3.0 if step > 50 and step % 70 < 3 and not is_repaired else 0.02

    model = stack([NUM_FEATURES, 64, 64, NUM_CLASSES], nn.ReLU, he)
    data = batches(clusters(1200))
    return Training(model=model, optimizer=sgd(model, 0.02), batches=data, num_steps=300, schedule=schedule)


def nan(is_repaired: bool) -> Training:
    model = nn.Sequential(
        nn.Linear(NUM_FEATURES, 64), nn.ReLU(), Temperature(0.01 if is_repaired else 0.0), nn.Linear(64, NUM_CLASSES)
    )
    return Training(model=model, optimizer=adam(model, 2e-3), batches=batches(clusters(1200)), num_steps=300)


class Temperature(nn.Module):
    """Divides by a temperature that falls from 1 to its floor over 200 forward passes."""

    def __init__(self, floor: float) -> None:
        super().__init__()
        self.floor, self.calls = floor, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        temperature = max(1.0 - self.calls / 200, self.floor)
        return functional.softmax(x / temperature, dim=-1)


def overfitting(is_repaired: bool) -> Training:
    x, y = clusters(2000, spread=2.0)
    held_out = x[1600:], y[1600:]
    few = 1600 if is_repaired else 80
    model = stack([NUM_FEATURES, 256, 128, NUM_CLASSES], nn.ReLU, he)
    data = batches((x[:few], y[:few]), 40)
    return Training(
        model=model,
        optimizer=adam(model, 5e-4 if is_repaired else 2e-3),
        batches=data,
        num_steps=300,
        held_out=held_out,
    )


class Attention(nn.Module):
    """Causal attention in which queries and keys may be normalised before their product."""

    def __init__(self, dim: int, num_heads: int, *, is_normalised: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm_q, self.norm_k = (
            nn.LayerNorm(dim // num_heads) if is_normalised else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self.norm_q(heads[0]), self.norm_k(heads[1]), heads[2]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, dim: int, num_heads: int, *, is_normalised: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads, is_normalised=is_normalised)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class SmallGPT(nn.Module):
    """Two layers of a language model."""

    def __init__(self, vocabulary: int = 24, dim: int = 32, *, is_normalised: bool) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, dim), nn.Embedding(64, dim)
        self.blocks = nn.Sequential(*[Block(dim, 4, is_normalised=is_normalised) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        places = self.place(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(self.token(x) + places)))  # type: ignore[no-any-return]


def attention(is_repaired: bool) -> Training:
    model = SmallGPT(is_normalised=is_repaired)
    for block in model.blocks:
        nn.init.normal_(block.attention.qkv.weight[:64], std=2.0)  # type: ignore[union-attr,index]
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return Training(model=model, optimizer=optimizer, batches=tokens(), num_steps=200)


FAULTS: Final[dict[str, Fault]] = {
    "vanishing": Fault(
        rule="vanishing_gradients",
        story="Ten layers with sigmoids: each passes on at most a quarter of its gradient.",
        wrong="nn.Linear(24, 24), nn.Sigmoid()",
        right="nn.Linear(24, 24), nn.GELU()   # and He initialisation",
        build=vanishing,
    ),
    "exploding": Fault(
        rule="init_scale",
        story="Weights start four times too large, so values and gradients grow about fourfold from layer to layer.",
        wrong="nn.init.normal_(weight, std=4 * sqrt(2 / fan_in))",
        right="nn.init.kaiming_normal_(weight)",
        build=exploding,
    ),
    "dead-relu": Fault(
        rule="dead_relu",
        story="Biases of -8 keep every unit of one layer below zero, where ReLU passes nothing on.",
        wrong="nn.init.constant_(layer.bias, -8.0)",
        right="nn.init.zeros_(layer.bias)",
        build=dead_relu,
    ),
    "spike": Fault(
        rule="loss_spikes",
        story="A faulty schedule restarts every 70 steps, with a learning rate that is 150 times too high.",
        wrong="lr = 3.0 if step % 70 < 3 else 0.02",
        right="lr = 0.02",
        build=spike,
    ),
    "nan": Fault(
        rule="nan_inf",
        story="A schedule lowers the temperature of a softmax, and reaches 0 at step 200.",
        wrong="softmax(x / max(1 - step / 200, 0.0))",
        right="softmax(x / max(1 - step / 200, 0.01))",
        build=nan,
    ),
    "overfitting": Fault(
        rule="overfitting",
        story="A network of 40,000 parameters trains on 80 rows and memorises them.",
        wrong="x[:80], y[:80]",
        right="x[:1600], y[:1600]   # and a lower learning rate",
        build=overfitting,
    ),
    "attention": Fault(
        rule="attention_entropy_collapse",
        story="Queries and keys of a small GPT start too large, so each head sees a single token.",
        wrong="scaled_dot_product_attention(q, k, v)",
        right="scaled_dot_product_attention(norm_q(q), norm_k(k), v)",
        build=attention,
    ),
}
