"""A NaN or an infinity planted in real models, with autocast and checkpointing: the step and the place are right.

Small tensors are held until the pass is over; without that, as with large ones, only those that autograd keeps are
known, and an event may name an interval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sonde
from sonde.session.observers import nonfinite

AT = 2
CHECKPOINT = {"use_reentrant": False}
REENTRANT = {"use_reentrant": True}


def gpt2(checkpoint: dict[str, bool] | None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=61, n_positions=32, bos_token_id=1, eos_token_id=1, use_cache=False
    )
    return language_model(GPT2LMHeadModel(config), checkpoint)


def llama(checkpoint: dict[str, bool] | None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=61,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return language_model(LlamaForCausalLM(config), checkpoint)


def language_model(model: Any, checkpoint: dict[str, bool] | None) -> tuple[nn.Module, Callable[[], Tensor]]:
    if checkpoint is not None:
        model.gradient_checkpointing_enable(checkpoint)
    model.train()
    tokens = torch.randint(0, 61, (3, 16))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def vit(checkpoint: None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8
    )
    model = ViTForImageClassification(config).train()
    x, y = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    return model, lambda: functional.cross_entropy(model(pixel_values=x).logits, y)


class Block(nn.Module):
    """A block of a residual network, with activations in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        z: Tensor = self.relu(y)
        return z


def resnet(checkpoint: None = None) -> tuple[nn.Module, Callable[[], Tensor]]:
    parts = [nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)]
    model = nn.Sequential(*parts).to(memory_format=torch.channels_last)
    x, y = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last), torch.tensor([0, 1])
    return model, lambda: functional.cross_entropy(model(x), y)


class Case(NamedTuple):
    """A fault: where, what, and what it is done to."""

    make: Any
    module: str
    value: float = math.nan
    is_single: bool = True
    checkpoint: dict[str, bool] | None = None
    autocast: torch.dtype | None = None
    interval: tuple[str, ...] = ()
    """If the output is not held: the modules that it may have come from; empty if the module itself is named."""


BF16 = torch.bfloat16
CASES = [
    Case(gpt2, "transformer.wte", interval=("transformer.wte", "transformer.wpe", "transformer.drop")),
    Case(gpt2, "transformer.h.0.ln_1"),
    Case(gpt2, "transformer.h.0.ln_1", math.inf, autocast=BF16),
    Case(gpt2, "transformer.h.1.attn.c_attn", autocast=BF16),
    Case(gpt2, "transformer.h.1.attn.c_proj", autocast=BF16),
    Case(gpt2, "transformer.h.1.mlp.c_fc", is_single=False),
    Case(gpt2, "transformer.h.1.mlp.act", math.inf, autocast=BF16),
    Case(gpt2, "transformer.h.1.mlp.c_proj"),
    Case(gpt2, "transformer.ln_f", autocast=BF16),
    Case(gpt2, "lm_head", is_single=False, autocast=BF16),
    Case(gpt2, "transformer.h.0.mlp.c_proj", checkpoint=CHECKPOINT),
    Case(gpt2, "transformer.h.1.ln_2", checkpoint=REENTRANT, autocast=BF16),
    Case(llama, "model.embed_tokens"),
    Case(
        llama,
        "model.layers.1.self_attn.q_proj",
        interval=("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"),
    ),
    Case(llama, "model.layers.1.self_attn.q_proj", checkpoint=CHECKPOINT, autocast=BF16),
    Case(llama, "model.layers.0.self_attn.v_proj", autocast=BF16),
    Case(llama, "model.layers.0.mlp.gate_proj", math.inf, checkpoint=REENTRANT),
    Case(llama, "model.layers.1.post_attention_layernorm", autocast=BF16),
    Case(llama, "model.layers.1.mlp.down_proj", checkpoint=CHECKPOINT, is_single=False),
    Case(vit, "vit.embeddings.patch_embeddings.projection"),
    Case(vit, "classifier", math.inf),
    Case(resnet, "0"),
    Case(resnet, "1.conv1", autocast=BF16),
    Case(resnet, "1.bn1"),
    Case(resnet, "2.conv2", math.inf, autocast=BF16),
    Case(resnet, "1.bn2", is_single=False),
    Case(resnet, "5"),
]


def plant(model: nn.Module, case: Case, is_on: list[bool]) -> None:
    """Write the value into the output, as if the module had computed it."""
    module = model.get_submodule(case.module)
    forward = module.forward

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if is_on[0]:
            output.data[tuple(size // 3 for size in output.shape) if case.is_single else ...] = case.value
        return output

    module.forward = spoiled


def events_of(path: Any) -> list[dict[str, Any]]:
    rows = sonde.open(path).events().to_pylist()
    assert not [row for row in rows if row["type"] == "error"]
    return [{**row, **json.loads(row["details"])} for row in rows if row["type"] == "nonfinite"]


@pytest.mark.parametrize("is_held", [pytest.param(True, marks=pytest.mark.slow), False], ids=["held", "freed"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.module}-{case.value}-{bool(case.checkpoint)}-{bool(case.autocast)}"
)
def test_the_step_and_the_place_are_right(
    begin: Any, monkeypatch: pytest.MonkeyPatch, case: Case, is_held: bool
) -> None:
    if not is_held:
        monkeypatch.setattr(nonfinite, "SMALL_BYTES", 0)
    torch.manual_seed(0)
    model, loss = case.make(case.checkpoint)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    is_on = [False]
    plant(model, case, is_on)
    session = begin(live_rules=False, system_metrics=False).watch(model, optimizer, activations=False, inspect=False)
    for step in range(AT + 2):
        is_on[0] = step == AT
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=case.autocast or BF16, enabled=case.autocast is not None):
            value = loss()
        value.backward()
        optimizer.step()
    sonde.finish()
    first = events_of(session.path)[0]
    assert first["step"] == AT
    assert not first["came_with_data"]
    if case.interval and not is_held:
        assert set(case.interval) >= {*first["unknown"], case.module} > {case.module}
    else:
        assert (first["suspect"] or first["site"]) == case.module
        assert first["suspect"] or (not first["unknown"] and first["role"] == "output")
        assert first["suspect"] or first["value"] == str(case.value)
