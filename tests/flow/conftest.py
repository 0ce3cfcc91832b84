"""A zoo of small models, each with its batch and its loss, and the state of a model as one word."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


class Case(NamedTuple):
    model: nn.Module
    x: Any
    y: Any
    loss_fn: Any
    others: tuple[nn.Module, ...] = ()
    """Models that the loss uses."""
    autocast: bool = False


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(x + self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int = 16) -> None:
        super().__init__()
        self.rnn, self.head = kind(6, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class OwnCell(nn.Module):
    """A loop over time, with a counter and a hidden state that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.RNNCell(6, 16), nn.Linear(16, 3)
        self.num_calls, self.seen, self.state = 0, [], torch.zeros(1)  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.seen.append(x.shape)
        hidden = torch.zeros(len(x), 16)
        for t in range(x.shape[1]):
            hidden = self.cell(x[:, t], hidden)
        self.state, self.fresh = hidden, True
        return self.head(hidden)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.num_heads, self.is_causal = num_heads, is_causal

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, is_causal=self.is_causal)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class TiedGPT(nn.Module):
    def __init__(self, *, uses_checkpoint: bool | None = None) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 16), nn.Parameter(torch.randn(8, 16) * 0.02)
        self.blocks = nn.ModuleList(Block(16, 4, is_causal=True) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)
        self.uses_checkpoint = uses_checkpoint

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x) if self.uses_checkpoint is None else checkpoint(block, x, use_reentrant=self.uses_checkpoint)
        return self.head(self.norm(x))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(16, 2, is_causal=False) for _ in range(2)))
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(image).flatten(2).transpose(1, 2)).mean(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.relu(self.down1(x))
        return self.out(torch.cat([first, self.up(F.relu(self.down2(first)))], 1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(torch.tanh(self.left(left) + self.right(right)))}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def images(width: int = 3, size: int = 8) -> Tensor:
    return torch.randn(8, width, size, size)


def labels(num: int = 5, size: int = 8) -> Tensor:
    return torch.randint(num, (size,))


def tokens() -> Tensor:
    return torch.randint(20, (4, 8))


def mlp(*activations: nn.Module) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Linear(10, 16)]
    for activation in activations:
        parts += [activation, nn.Linear(16, 16)]
    return nn.Sequential(*parts, nn.ReLU(), nn.Linear(16, 3))


def gan() -> Case:
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    discriminator = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    discriminator(torch.randn(4, 8)).sum().backward()
    return Case(generator, torch.randn(8, 4), None, lambda fake: -discriminator(fake).mean(), (discriminator,))


def hugging_face(name: str) -> Case:
    import transformers as tr

    small: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = torch.randint(3, 32, (4, 8))
    if name == "bert":
        model: Any = tr.BertForMaskedLM(tr.BertConfig(**small, intermediate_size=32, max_position_embeddings=16))
    elif name == "llama":
        model = tr.LlamaForCausalLM(tr.LlamaConfig(**small, intermediate_size=32, num_key_value_heads=1))
    elif name == "gpt2":
        model = tr.GPT2LMHeadModel(
            tr.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
        )
    else:
        config = tr.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
        config.decoder_start_token_id = 0
        model = tr.T5ForConditionalGeneration(config)
    model.train()
    return Case(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids.clone(), None)


ZOO: dict[str, Callable[[], Case]] = {
    "mlp": lambda: Case(mlp(nn.ReLU(), nn.GELU()), torch.randn(8, 10), labels(3), nn.CrossEntropyLoss()),
    "resnet": lambda: Case(ResNet(), images(), labels(), nn.CrossEntropyLoss()),
    "batchnorm": lambda: Case(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)),
        images(), labels(), nn.CrossEntropyLoss(),
    ),
    "lstm": lambda: Case(Recurrent(nn.LSTM), torch.randn(4, 12, 6), labels(3, 4), nn.CrossEntropyLoss()),
    "gru": lambda: Case(Recurrent(nn.GRU), torch.randn(4, 12, 6), labels(3, 4), nn.CrossEntropyLoss()),
    "own_cell": lambda: Case(OwnCell(), torch.randn(4, 12, 6), labels(3, 4), nn.CrossEntropyLoss()),
    "tied_gpt": lambda: Case(TiedGPT(), tokens(), tokens(), cross_entropy),
    "checkpointed": lambda: Case(TiedGPT(uses_checkpoint=False), tokens(), tokens(), cross_entropy),
    "checkpointed_reentrant": lambda: Case(TiedGPT(uses_checkpoint=True), tokens(), tokens(), cross_entropy),
    "autocast": lambda: Case(TiedGPT(), tokens(), tokens(), cross_entropy, autocast=True),
    "encoder": lambda: Case(Encoder(), torch.randn(4, 6, 16), labels(3, 4), nn.CrossEntropyLoss()),
    "vit": lambda: Case(ViT(), images(), labels(), nn.CrossEntropyLoss()),
    "unet": lambda: Case(UNet(), images(1), images(1), nn.MSELoss()),
    "gan": gan,
    "autoencoder": lambda: Case(
        nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 12)),
        torch.randn(8, 12), torch.randn(8, 12), nn.MSELoss(),
    ),
    "dict_inputs": lambda: Case(
        TwoInputs(), {"left": torch.randn(4, 4), "right": torch.randn(4, 6)}, labels(2, 4),
        lambda out, y: F.cross_entropy(out["logits"], y),
    ),
    "tuple_inputs": lambda: Case(
        nn.Bilinear(4, 6, 2), (torch.randn(4, 4), torch.randn(4, 6)), labels(2, 4), nn.CrossEntropyLoss(),
    ),
    "dropout": lambda: Case(mlp(nn.Dropout(0.5), nn.Tanh()), torch.randn(8, 10), labels(3), nn.CrossEntropyLoss()),
    "spectral_norm": lambda: Case(
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)),
        torch.randn(4, 6), labels(2, 4), nn.CrossEntropyLoss(),
    ),
    "inplace_first": lambda: Case(
        nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2)), torch.randn(4, 6), labels(2, 4), nn.CrossEntropyLoss(),
    ),
    "max_norm": lambda: Case(
        nn.Sequential(nn.Embedding(20, 8, max_norm=0.5), nn.Flatten(), nn.Linear(64, 3)), tokens(), labels(3, 4),
        nn.CrossEntropyLoss(),
    ),
    "bert": lambda: hugging_face("bert"),
    "llama": lambda: hugging_face("llama"),
    "gpt2": lambda: hugging_face("gpt2"),
    "t5": lambda: hugging_face("t5"),
}  # fmt: skip


def build(name: str) -> Case:
    """A case as training would leave it: with gradients, and with one part in evaluation mode."""
    torch.manual_seed(0)
    case = ZOO[name]()
    for parameter in list(case.model.parameters())[::2]:
        parameter.grad = torch.randn_like(parameter)
    leaves = [module for module in case.model.modules() if not module._modules]
    leaves[-1].eval()
    return case


@pytest.fixture(params=sorted(ZOO))
def case(request: pytest.FixtureRequest) -> Case:
    return build(request.param)


@pytest.fixture
def zoo() -> Callable[[str], Case]:
    return build


def _words(value: Any) -> Any:
    """An attribute as something that can be compared: contents of tensors and containers, identity of the rest."""
    if isinstance(value, Tensor):
        return id(value), value.detach().float().cpu().numpy().tobytes()
    if isinstance(value, dict):
        return [(str(key), _words(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_words(item) for item in value]
    return value if isinstance(value, bool | int | float | str | type(None)) else id(value)


def state_of(*models: nn.Module) -> dict[str, str]:
    """Everything about models that an analysis must not change, by what it is."""
    found: dict[str, Any] = {
        "random": (torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()[1].tobytes()),  # noqa: NPY002
        "global hooks": [len(hooks) for name, hooks in vars(torch_module).items() if name.startswith("_global_")
                         and isinstance(hooks, dict)],
        "torch": [id(function) for function in (F.relu, F.softmax, torch.softmax, F.scaled_dot_product_attention)],
    }  # fmt: skip
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            for attribute, value in vars(module).items():
                found[f"{number} {name}.{attribute}"] = _words(value)
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            found[f"{number} {name} grad"] = None if grad is None else _words(grad)
            found[f"{number} {name} hooks"] = (
                len(parameter._backward_hooks or ()), len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
            )  # fmt: skip
    return {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in found.items()}


@pytest.fixture
def state() -> Callable[..., dict[str, str]]:
    return state_of


@pytest.fixture
def changed() -> Callable[[dict[str, str], dict[str, str]], list[str]]:
    """Names of what differs between two states."""
    return lambda a, b: sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


@pytest.fixture
def deep() -> Callable[..., nn.Sequential]:
    """A deep network of one activation, whose weights are He-initialised unless given a gain."""

    def make(depth: int = 12, width: int = 32, activation: Any = nn.ReLU, gain: float = math.sqrt(2)) -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(depth):
            linear = nn.Linear(width, width)
            nn.init.normal_(linear.weight, std=gain / math.sqrt(width))
            nn.init.zeros_(linear.bias)
            layers += [linear, activation()]
        return nn.Sequential(*layers, nn.Linear(width, 4))

    return make
