"""The models that the benchmarks of real training use: published architectures, built from their packages.

Each entry of `MODELS` builds a model, its optimizer and a function that makes one training step on random data, in the
way the model is usually trained (autocast to bfloat16 on a GPU, channels-last images, a fused optimizer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its optimizer, and one step of training that returns the loss."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step


@dataclass(frozen=True, slots=True)
class RealModel:
    """How to build a workload on a device, and how many steps its benchmark makes."""

    what: str
    build: Callable[[str], Workload]
    num_steps: int


def image_step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, batch: int, size: int) -> Step:
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device=device)
    return classifier_step(model, optimizer, images, labels)


def classifier_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=inputs.is_cuda):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Step:
    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def resnet50(device: str) -> Workload:
    from torchvision.models import resnet50 as build

    model = build().to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, optimizer, image_step(model, optimizer, device, batch=128, size=224))


def resnet18(device: str) -> Workload:
    from torchvision.models import resnet18 as build

    model = build(num_classes=10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, optimizer, image_step(model, optimizer, device, batch=16, size=64))


def vit(device: str) -> Workload:
    from torchvision.models import vit_b_16

    model = vit_b_16().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, image_step(model, optimizer, device, batch=128, size=224))


def gpt2(device: str, *, compiled: bool = False) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    called: Any = torch.compile(model) if compiled else model
    return Workload(model, optimizer, language_step(called, optimizer, torch.randint(50257, (16, 1024), device=device)))


def gpt2_tiny(device: str) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Workload(model, optimizer, language_step(model, optimizer, torch.randint(256, (8, 128), device=device)))


def llama(device: str) -> Workload:
    """0.9 billion parameters, with gradient checkpointing."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).to(device)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Workload(model, optimizer, language_step(model, optimizer, torch.randint(32000, (4, 2048), device=device)))


def mlp(device: str) -> Workload:
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(512, 784, device=device), torch.randint(10, (512,), device=device)
    return Workload(model, optimizer, classifier_step(model, optimizer, inputs, labels))


def small_mlp(device: str) -> Workload:
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(64, 784, device=device), torch.randint(10, (64,), device=device)
    return Workload(model, optimizer, classifier_step(model, optimizer, inputs, labels))


def small_cnn(device: str) -> Workload:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Workload(model, optimizer, image_step(model, optimizer, device, batch=64, size=32))


GPU_MODELS = {
    "resnet50": RealModel("torchvision ResNet-50, batch 128, channels-last, SGD", resnet50, 2000),
    "vit": RealModel("torchvision ViT-B/16, batch 128, fused AdamW", vit, 2000),
    "gpt2": RealModel("transformers GPT-2 small, 16×1024, fused AdamW", gpt2, 2000),
    "gpt2-compiled": RealModel("the same, torch.compile", lambda device: gpt2(device, compiled=True), 2000),
    "llama": RealModel("transformers Llama 0.9 B, gradient checkpointing, 4×2048, fused AdamW", llama, 2000),
    "mlp": RealModel("MLP 784-1024-1024-10, batch 512, Adam", mlp, 20_000),
}
CPU_MODELS = {
    "small-cnn": RealModel("CNN of two convolutions, 32×32 images, batch 64, SGD", small_cnn, 5000),
    "small-mlp": RealModel("MLP 784-256-10, batch 64, Adam", small_mlp, 20_000),
    "mlp": RealModel("MLP 784-1024-1024-10, batch 512, Adam", mlp, 2000),
    "gpt2-tiny": RealModel("transformers GPT-2, 4 layers of width 128, 8×128, AdamW", gpt2_tiny, 2000),
    "resnet18": RealModel("torchvision ResNet-18, 64×64 images, batch 16, SGD", resnet18, 1500),
}
