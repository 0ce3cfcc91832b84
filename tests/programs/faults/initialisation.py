"""Weights that start wrong: too wide, too small, all the same; and skip connections that lose their input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from faults import data
from faults.program import Job, endless, program
from faults.stacks import (
    LanguageModel,
    ResidualBlock,
    cnn,
    constant,
    fill,
    he,
    mlp,
    normal,
    token_loss,
    xavier,
)


def _job(model: nn.Module, split: data.Split, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> Job:
    (x, y), val = split
    is_class = not y.is_floating_point()
    loss: nn.Module = nn.CrossEntropyLoss() if is_class else nn.MSELoss()
    return Job(model, optimizer, loss, endless(x, y, 64, seed), steps, val=val, val_every=50, is_accuracy=is_class)


# ---------------------------------------------------------------------------------------------------------------- scale


@program(
    "init_wide_language_model",
    "init_scale",
    also_ok=(
        "lr_too_low",
        "attention_logit_growth",
        "attention_entropy_collapse",
        "output_logit_growth",
        "underfitting",
    ),
    source="OLMo-2: N(0, 0.02) for language models; here N(0, 1)",
)
def _wide_language(seed: int, fixed: bool) -> Job:
    model = LanguageModel(layers=3)
    if not fixed:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 1.0)
    return Job(model, AdamW(model.parameters(), 3e-3), token_loss, data.language(seed), 200)


@program(
    "init_tiny_conv",
    "init_scale",
    also_ok=("vanishing_gradients", "underfitting", "lr_too_low", "rank_collapse"),
    source="DeepDiagnosis: weights with a variance below 1e-5",
)
def _tiny_conv(seed: int, fixed: bool) -> Job:
    model = fill(cnn((12, 24, 32), 48, 8), he if fixed else normal(1e-3))
    return _job(model, data.images(), SGD(model.parameters(), 0.05, momentum=0.9), 200, seed)


@program(
    "init_wide_head",
    "init_scale",
    also_ok=("lr_too_high", "loss_spikes", "output_logit_growth", "underfitting", "exploding_gradients"),
    source="TheDeepChecker: |L0 - ln C| >= ln C",
)
def _wide_mlp(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 96, 96, 96, 5]), he if fixed else normal(1.0))
    return _job(model, data.clusters(), Adam(model.parameters(), 1e-3), 200, seed)


@program("healthy_small_normal_init")
def _healthy_small(seed: int, fixed: bool) -> Job:
    """N(0, 0.02) in front of layer norms: small weights are no fault where something rescales."""
    model = LanguageModel(layers=3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, 0.0, 0.02)
    return Job(model, AdamW(model.parameters(), 3e-3), token_loss, data.language(seed), 200)


@program("healthy_wide_init_batchnorm")
def _healthy_batchnorm(seed: int, fixed: bool) -> Job:
    """Weights drawn ten times too wide in front of batch norms: the norm takes the scale away."""
    model = fill(mlp([20, 64, 64, 5], norm=True), normal(1.0))
    he(model[-1].weight)  # type: ignore[index]
    return _job(model, data.clusters(), Adam(model.parameters(), 3e-3), 250, seed)


@program("healthy_orthogonal_selu")
def _healthy_selu(seed: int, fixed: bool) -> Job:
    def lecun(weight: Tensor) -> None:
        nn.init.normal_(weight, 0.0, weight[0].numel() ** -0.5)

    model = fill(mlp([20, 48, 48, 48, 48, 5], nn.SELU), lecun)
    return _job(model, data.clusters(), Adam(model.parameters(), 1e-3), 250, seed)


# ------------------------------------------------------------------------------------------------------------- symmetry

_SAME = (
    "vanishing_gradients",
    "underfitting",
    "dead_relu",
    "init_scale",
    "lr_too_low",
    "rank_collapse",
    "bottleneck_layer",
)


@program("symmetric_constant_mlp", "symmetric_init", also_ok=_SAME, source="NeuraLint: constant initialisation")
def _constant(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 48, 48, 5]), he if fixed else constant(0.05))
    return _job(model, data.clusters(), Adam(model.parameters(), 2e-3), 250, seed)


@program("symmetric_zero_conv", "symmetric_init", also_ok=_SAME, source="DeepCrime: weights set to zero")
def _zero(seed: int, fixed: bool) -> Job:
    model = fill(cnn((12, 24), 48, 8), he if fixed else constant(0.0))
    return _job(model, data.images(), SGD(model.parameters(), 0.05, momentum=0.9), 200, seed)


@program("symmetric_ones_tanh", "symmetric_init", also_ok=(*_SAME, "saturated_activations"), source="DeepCrime: ones")
def _ones(seed: int, fixed: bool) -> Job:
    model = fill(mlp([8, 32, 32, 1], nn.Tanh), xavier if fixed else constant(0.1))
    return _job(model, data.regression(), SGD(model.parameters(), 0.05, momentum=0.9), 250, seed)


@program("healthy_zero_head")
def _healthy_zero_head(seed: int, fixed: bool) -> Job:
    """The last layer starts at zero: its units get different gradients from the targets and part at once."""
    model = fill(mlp([20, 64, 64, 5]), he)
    nn.init.zeros_(model[-1].weight)  # type: ignore[index]
    return _job(model, data.clusters(), Adam(model.parameters(), 2e-3), 250, seed)


@program("healthy_zero_branches")
def _healthy_zero_branches(seed: int, fixed: bool) -> Job:
    """Residual branches that start at zero (SkipInit, zero gamma): every block begins as the identity."""
    blocks = [ResidualBlock(48) for _ in range(6)]
    for block in blocks:
        nn.init.zeros_(block.down.weight)
    model = nn.Sequential(nn.Linear(20, 48), *blocks, nn.LayerNorm(48), nn.Linear(48, 5))
    return _job(model, data.clusters(), Adam(model.parameters(), 1e-3), 250, seed)


@program("healthy_linear_regression_from_zero")
def _healthy_from_zero(seed: int, fixed: bool) -> Job:
    """One linear layer from zero weights: convex, nothing to part."""
    (x, _), (xv, _) = data.regression()
    w = torch.linspace(-1, 1, 8).unsqueeze(1)
    model = nn.Linear(8, 1)
    nn.init.zeros_(model.weight)
    return _job(model, ((x, x @ w), (xv, xv @ w)), SGD(model.parameters(), 0.05), 200, seed)


# ------------------------------------------------------------------------------------------------------------- residual

_FADING = ("vanishing_gradients", "underfitting", "rank_collapse")


@program("residual_half_skip_deep", "residual_decay", also_ok=_FADING, source="DEForm: residual scale")
def _half_skip(seed: int, fixed: bool) -> Job:
    blocks = [ResidualBlock(32, 1.0 if fixed else 0.4, norm=False) for _ in range(12)]
    model = nn.Sequential(nn.Linear(20, 32), *blocks, nn.Linear(32, 5))
    return _job(model, data.clusters(), Adam(model.parameters(), 5e-4), 200, seed)


@program("residual_transformer_weak_skip", "residual_decay", also_ok=_FADING, source="DEForm RSR: shortcut scaled down")
def _weak_skip(seed: int, fixed: bool) -> Job:
    model = LanguageModel(layers=4, width=32, skip=1.0 if fixed else 0.25)
    return Job(model, AdamW(model.parameters(), 2e-3), token_loss, data.language(seed, batch=16, length=24), 120)


@program(
    "residual_transformer_no_skip",
    "residual_decay",
    also_ok=_FADING,
    source="DEForm; Dong 2021: attention is not enough",
)
def _no_skip(seed: int, fixed: bool) -> Job:
    model = LanguageModel(layers=4, width=32, skip=1.0 if fixed else 0.0)
    return Job(model, AdamW(model.parameters(), 2e-3), token_loss, data.language(seed, batch=16, length=24), 120)


@program("healthy_post_norm")
def _healthy_post_norm(seed: int, fixed: bool) -> Job:
    """A post-norm encoder: each norm takes some of the stream away, and that is how it was published."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.tok, self.pos = nn.Embedding(24, 32), nn.Embedding(32, 32)
            self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(32, 24)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
            return self.head(self.encoder(h, mask=mask, is_causal=True))  # type: ignore[no-any-return]

    model = Encoder()
    optimizer = AdamW(model.parameters(), 2e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))
    return Job(model, optimizer, token_loss, data.language(seed), 200, scheduler=warm_up, clip=1.0)
