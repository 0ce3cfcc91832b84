"""Transformer programs: masks that leak, logits that grow, heads that see one key, projections out of balance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from faults.data import copying, images, language
from faults.gpt import GPT, Encoder, Patches
from faults.program import Batch, Job, endless, program
from faults.recurrent import per_token

AdamW = torch.optim.AdamW
WILD = ("loss_spikes", "loss_oscillation", "exploding_gradients", "output_logit_growth", "underfitting", "lr_too_high")
SHARP = ("attention_entropy_collapse", "attention_logit_growth")


def _copier(**options: Any) -> GPT:
    return GPT(16, 23, **options)


def _job(model: nn.Module, batches: Iterable[Batch], *, lr: float, steps: int = 160, **options: Any) -> Job:
    optimizer = AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    return Job(model, optimizer, per_token, batches, steps, clip=1.0, **options)


# ------------------------------------------------------------------------------------------------------------- masks


@program("no_causal_mask", "attention_mask_leak", where="attention", source="DEForm MIM")
def _(seed: int, fixed: bool) -> Job:
    return _job(GPT(causal=fixed), language(seed), lr=3e-3)


@program("fused_without_is_causal", "attention_mask_leak", where="attention", source="is_causal forgotten")
def _(seed: int, fixed: bool) -> Job:
    return _job(GPT(fused=True, causal=fixed), language(seed), lr=3e-3)


@program("mask_off_by_one", "attention_mask_leak", where="attention", source="triu(2)")
def _(seed: int, fixed: bool) -> Job:
    return _job(GPT(layers=1, sees_ahead=0 if fixed else 1), language(seed), lr=3e-3)


@program(
    "encoder_as_language_model", "attention_mask_leak", where="encoder", source="no mask given to nn.TransformerEncoder"
)
def _(seed: int, fixed: bool) -> Job:
    return _job(Encoder(causal=fixed), language(seed), lr=3e-3)


def _hidden_tokens(seed: int) -> Iterator[Batch]:
    """Some tokens are replaced by a special token and are to be found again: both directions may be used."""
    g = torch.Generator().manual_seed(seed)
    for x, _ in language(seed, choices=2):
        hidden = torch.rand(x.shape, generator=g) < 0.2
        yield x.masked_fill(hidden, 24), torch.where(hidden, x, -100)


@program("h_hidden_tokens", source="control: attention in both directions, as it should be")
def _(seed: int, fixed: bool) -> Job:
    return _job(GPT(25, layers=1, causal=False), _hidden_tokens(seed), lr=1e-2, steps=300)


@program("h_vision_transformer", source="control: patches see one another")
def _(seed: int, fixed: bool) -> Job:
    (x, y), val = images(noise=0.3)
    model = Patches()
    batches = endless(x, y, 64, seed)
    return Job(
        model,
        AdamW(model.parameters(), 4e-3),
        functional.cross_entropy,
        batches,
        250,
        val=val,
        val_every=30,
        is_accuracy=True,
    )


@program("h_fused_language_model", source="control: the last loss is the entropy of the source")
def _(seed: int, fixed: bool) -> Job:
    return _job(GPT(fused=True), language(seed), lr=3e-3)


# ------------------------------------------------------------------------------------------------- logits and entropy


@program("attention_at_high_rate", (*SHARP, "lr_too_high"), also_ok=WILD, where="attention", source="Wortsman 2023")
def _(seed: int, fixed: bool) -> Job:
    return _job(_copier(fused=True, qk_norm=fixed), copying(seed), lr=2e-3 if fixed else 5e-2)


@program(
    "attention_unscaled", SHARP, also_ok=(*WILD, "init_scale"), where="attention", source="DEForm SDS: no 1/sqrt(d)"
)
def _(seed: int, fixed: bool) -> Job:
    model = _copier(scale=None if fixed else 4.0)
    if not fixed:
        for attention in model.attentions:
            nn.init.normal_(attention.query.weight, 0, 0.3)
            nn.init.normal_(attention.key.weight, 0, 0.3)
    return _job(model, copying(seed), lr=2e-3)


@program(
    "attention_loud_queries",
    SHARP,
    also_ok=(*WILD, "init_scale", "qkv_imbalance"),
    where="attention",
    source="Zhai 2023",
)
def _(seed: int, fixed: bool) -> Job:
    model = _copier(fused=True)
    if not fixed:
        for attention in model.attentions:
            nn.init.normal_(attention.query.weight, 0, 1.0)
            nn.init.normal_(attention.key.weight, 0, 1.0)
    return _job(model, copying(seed), lr=2e-3)


@program("h_copy_heads", source="control: a head that copies is rightly sharp")
def _(seed: int, fixed: bool) -> Job:
    return _job(_copier(), copying(seed), lr=4e-3, steps=320)


# ---------------------------------------------------------------------------------------------------------- q, k, v


@program(
    "queries_hundredfold", "qkv_imbalance", also_ok=(*SHARP, *WILD, "init_scale"), where="attention", source="seed 003"
)
def _(seed: int, fixed: bool) -> Job:
    model = _copier()
    if not fixed:
        for attention in model.attentions:
            attention.query.weight.data *= 5000
            attention.key.weight.data /= 3
    return _job(model, copying(seed), lr=2e-3)


@program(
    "queries_learn_slowly",
    "qkv_imbalance",
    also_ok=("underfitting", "frozen_layers", "lr_too_low"),
    where="query",
    source="wrong parameter group",
)
def _(seed: int, fixed: bool) -> Job:
    model = _copier(fused=True)
    slow = [p for a in model.attentions for p in (a.query.weight, a.query.bias)]
    rest = [p for p in model.parameters() if not any(p is s for s in slow)]
    groups: list[dict[str, Any]] = [{"params": rest}, {"params": slow, "lr": 3e-3 if fixed else 3e-6}]
    return Job(model, AdamW(groups, 3e-3, betas=(0.9, 0.95)), per_token, copying(seed), 200, clip=1.0)


@program(
    "queries_are_zero",
    "qkv_imbalance",
    also_ok=("frozen_layers", "underfitting", "symmetric_init", "vanishing_gradients", "optimizer_missing_params"),
    where="query",
    source="DEForm QZQ",
)
def _(seed: int, fixed: bool) -> Job:
    model = _copier()
    if not fixed:
        for attention in model.attentions:
            for p in attention.query.parameters():
                nn.init.zeros_(p)
                p.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 3e-3, betas=(0.9, 0.95))
    return Job(model, optimizer, per_token, copying(seed), 200, clip=1.0)
