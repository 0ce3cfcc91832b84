"""Recurrent cells, attention, adapters, experts and temperatures."""

from __future__ import annotations

from typing import Any

from torch import nn

from programs.fault import (
    BROKEN,
    SLOW,
    fault,
    is_in,
    turns,
)
from programs.setup import Setup


@fault(
    "rnn_vanishing_temporal",
    "rnn_vanishing_temporal init_scale vanishing_gradients",
    num=4,
    where=lambda a, t: a.name in ("rnn", "gru", "lstm") and t.name == "recall",
)
def _forgets(s: Setup, level: int) -> None:
    factor = (0.1, 0.03, 0.01)[level]
    s.edits.append(lambda model: model.cell.weight_hh_l0.data.mul_(factor))
    if s.architecture.name != "rnn":
        s.edits.append(lambda model: model.cell.bias_hh_l0.data.sub_(5.0))


@fault(
    "rnn_exploding_temporal",
    "rnn_exploding_temporal init_scale exploding_gradients",
    also=(*BROKEN, "lr_too_high", "clip_too_tight"),
    num=4,
    where=is_in("rnn", "gru"),
)
def _blows_up(s: Setup, level: int) -> None:
    factor = (5.0, 8.0, 15.0)[level]
    s.edits.append(lambda model: model.cell.weight_hh_l0.data.mul_(factor))


@fault(
    "attention_entropy_collapse",
    "attention_entropy_collapse attention_logit_growth init_scale",
    also=BROKEN,
    num=5,
    where=turns("scale"),
)
def _sharp(s: Setup, level: int) -> None:
    s.options["scale"] = (300.0, 1000.0, 3000.0)[level]


@fault(
    "attention_logit_growth",
    "uneven_learning_rates attention_logit_growth attention_entropy_collapse qkv_imbalance lr_too_high",
    also=BROKEN,
    num=4,
    where=turns("scale"),
    optimizers=("adam", "adamw"),
)
def _fast_queries(s: Setup, level: int) -> None:
    factor = (50, 100, 300)[level]

    def groups(model: nn.Module, rate: float) -> list[Any]:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        fast = [p for n, p in named if "q_proj" in n or "k_proj" in n]
        return [
            {"params": [p for n, p in named if not ("q_proj" in n or "k_proj" in n)]},
            {"params": fast, "lr": rate * factor},
        ]

    s.groups = groups


@fault(
    "qkv_imbalance",
    "qkv_imbalance uneven_learning_rates lr_too_low frozen_layers lr_not_applied",
    num=4,
    where=turns("scale"),
    outcome="always",
)
def _slow_values(s: Setup, level: int) -> None:
    factor = (1e-3, 1e-4, 1e-5)[level]

    def groups(model: nn.Module, rate: float) -> list[Any]:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        slow = [p for n, p in named if "v_proj" in n]
        return [{"params": [p for n, p in named if "v_proj" not in n]}, {"params": slow, "lr": rate * factor}]

    s.groups = groups


@fault("attention_mask_leak", also=(), num=4, where=turns("ahead"), outcome="gain")
def _sees_ahead(s: Setup, level: int) -> None:
    s.options["ahead"] = (1, 4, 16)[level]


@fault("output_logit_growth", "output_logit_growth lr_too_high", also=BROKEN, num=3, where=is_in("siamese"))
def _hot(s: Setup, level: int) -> None:
    s.options["temperature"] = (1e-3, 3e-4, 1e-4)[level]


@fault(
    "moe_routing_collapse",
    also=("detached_graph", "vanishing_gradients", "frozen_layers", "optimizer_missing_params"),
    num=4,
    where=is_in("mixture"),
    outcome="always",
)
def _one_expert(s: Setup, level: int) -> None:
    s.options |= {"router_bias": (10.0, 20.0, 50.0)[level], "top": 1}


@fault(
    "lora_zero_init",
    also=(*SLOW, "frozen_layers", "lr_too_low", "symmetric_init", "detached_graph"),
    num=4,
    where=turns("rank"),
)
def _zero(s: Setup, level: int) -> None:
    s.options["zero"] = True


@fault("lora_scale_too_large", also=(*BROKEN, "lr_too_high"), num=4, where=turns("rank"))
def _strong(s: Setup, level: int) -> None:
    s.options["alpha"] = (400.0, 1500.0, 6000.0)[level]


@fault("lora_lr_too_high", "lr_too_high", also=(*BROKEN, "lora_scale_too_large"), num=4, where=turns("rank"))
def _fast_adapter(s: Setup, level: int) -> None:
    s.rate *= (60, 150, 500)[level]


@fault("lora_rank_too_low", "lora_rank_too_low underfitting", also=("loss_plateau",), num=3, where=turns("rank"))
def _low_rank(s: Setup, level: int) -> None:
    s.options |= {"rank": 1, "alpha": 2.0}
    s.steps = 200
