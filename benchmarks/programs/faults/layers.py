"""Activations, initialisation, width, dropout and skip connections."""

from __future__ import annotations

from torch import nn

from programs.fault import (
    BROKEN,
    SLOW,
    fault,
    is_in,
    is_not_lora,
    matrices,
    turns,
)
from programs.setup import PLAIN, Setup


@fault(
    "missing_nonlinearity",
    "missing_nonlinearity underfitting",
    also=("loss_plateau", "bottleneck_layer"),
    num=5,
    where=turns("act"),
)
def _linear(s: Setup, level: int) -> None:
    s.options["act"] = "none"


@fault("vanishing_gradients", "vanishing_gradients saturated_activations init_scale", num=5, where=is_in("deep_mlp"))
def _vanishing(s: Setup, level: int) -> None:
    s.options |= {"act": "sigmoid", "depth": (6, 8, 12)[level]}


@fault(
    "exploding_gradients",
    "exploding_gradients init_scale lr_too_high",
    also=BROKEN,
    num=5,
    optimizers=PLAIN,
    where=is_in("deep_mlp", "mlp", "cnn", "residual_mlp"),
)
def _exploding(s: Setup, level: int) -> None:
    gain = (4.0, 6.0, 10.0)[level]
    s.edits.append(lambda model: [w.data.mul_(gain) for w in matrices(model)])


@fault(
    "init_too_large",
    "init_scale",
    also=(*BROKEN, "exploding_gradients", "lr_too_low", "lr_too_high"),
    num=6,
    where=is_not_lora,
)
def _wide(s: Setup, level: int) -> None:
    factor = (20.0, 50.0, 200.0)[level]
    s.edits.append(lambda model: [w.data.mul_(factor) for w in matrices(model)])


@fault(
    "init_too_small",
    "init_scale vanishing_gradients",
    also=(*SLOW, "symmetric_init", "rank_collapse", "adam_epsilon_dominates"),
    num=5,
    optimizers=PLAIN,
    where=lambda a, _t: a.name in ("deep_mlp", "mlp", "cnn", "unet"),
)
def _narrow(s: Setup, level: int) -> None:
    factor = (1e-2, 1e-3, 1e-5)[level]
    s.edits.append(lambda model: [w.data.mul_(factor) for w in matrices(model)])


@fault(
    "symmetric_init",
    also=(*SLOW, "dead_relu", "init_scale", "rank_collapse", "saturated_activations", "frozen_layers"),
    num=6,
    where=is_in("mlp", "deep_mlp", "cnn", "autoencoder", "variational", "recommender", "unet"),
)
def _symmetric(s: Setup, level: int) -> None:
    value = (0.0, 0.05, 0.5)[level]
    s.edits.append(lambda model: [nn.init.constant_(w, value) for w in matrices(model)])


@fault(
    "dead_relu",
    "dead_relu",
    also=(*SLOW, "init_scale", "rank_collapse", "lr_too_low"),
    num=5,
    where=lambda a, _t: "act" in a.options and a.name not in ("normed_mlp", "normed_cnn"),
)
def _dead(s: Setup, level: int) -> None:
    shift = (-3.0, -10.0, -50.0)[level]
    s.edits.append(
        lambda model: [
            m.bias.data.add_(shift)
            for m in list(model.modules())[:-1]
            if isinstance(m, nn.Linear | nn.Conv2d) and m is not getattr(model, "head", None)
        ]
    )


@fault(
    "saturated_activations",
    "saturated_activations init_scale unnormalised_inputs",
    also=(*SLOW, *BROKEN),
    num=5,
    where=lambda a, _t: "act" in a.options and a.name in ("mlp", "deep_mlp", "cnn", "autoencoder", "recommender"),
    twin=lambda s, _level: s.options.update(act="tanh"),
)
def _saturated(s: Setup, level: int) -> None:
    factor = (10.0, 30.0, 100.0)[level]
    s.edits.append(lambda model: [w.data.mul_(factor) for w in matrices(model)[:-1]])


@fault(
    "bottleneck_layer",
    "bottleneck_layer underfitting",
    also=("rank_collapse", "loss_plateau", "dead_relu"),
    num=5,
    where=turns("narrow", "multiclass", "images", "localisation"),
)
def _narrow_layer(s: Setup, level: int) -> None:
    s.options["narrow"] = 1


@fault(
    "excessive_dropout",
    "excessive_dropout",
    also=(*SLOW, "lr_too_low", "loss_oscillation", "label_shuffling"),
    num=6,
    where=turns("dropout"),
)
def _dropped(s: Setup, level: int) -> None:
    s.options["dropout"] = (0.85, 0.92, 0.97)[level]


@fault(
    "residual_decay",
    "residual_decay rank_collapse vanishing_gradients",
    also=(*SLOW, "lr_too_low"),
    num=5,
    where=lambda a, _t: "skip" in a.options,
)
def _no_skip(s: Setup, level: int) -> None:
    s.options |= {"skip": (0.3, 0.1, 0.0)[level], "depth": 6}


@fault(
    "underfitting",
    "underfitting",
    also=("bottleneck_layer", "loss_plateau", "missing_nonlinearity"),
    num=4,
    where=turns("width", "multiclass", "binary", "regression"),
)
def _too_small(s: Setup, level: int) -> None:
    s.options["width"] = 1
