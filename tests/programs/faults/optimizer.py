"""Optimizers used wrongly: gradients kept or turned round, too much decay, too tight a clip, Adam's eps and moments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, Adam, AdamW, Optimizer

from faults import data
from faults.gpt import GPT
from faults.program import Batch, Job, Observer, endless, plain_step, program
from faults.stacks import cnn, fill, he, mlp, token_loss

_BLOWN_UP = (
    *("exploding_gradients", "loss_oscillation", "lr_too_high", "loss_spikes", "nan_inf", "dead_relu", "underfitting"),
    *("loss_divergence", "saturated_activations", "output_logit_growth", "constant_output", "attention_logit_growth"),
    *("attention_entropy_collapse", "overfitting"),
)
_STUCK = ("underfitting", "lr_too_low", "loss_plateau", "constant_output", "vanishing_gradients")


def _job(model: nn.Module, optimizer: Optimizer, split: data.Split, seed: int, **options: Any) -> Job:
    (x, y), val = split
    is_class = y.dtype == torch.long
    settings: dict[str, Any] = {"steps": 200, "val_every": 40, "loss_fn": cross_entropy if is_class else mse_loss}
    settings |= options
    return Job(
        model,
        optimizer,
        batches=endless(x, y, settings.pop("batch", 50), seed),
        val=val,
        is_accuracy=is_class,
        **settings,
    )


def _language(seed: int) -> Iterator[Batch]:
    return data.language(seed, batch=16, length=16)


# ---------------------------------------------------------------------------------------------- gradients kept, turned


@program("nozero_sgd_clusters", "missing_zero_grad", also_ok=_BLOWN_UP, source="TrainCheck, stackoverflow 60335387")
def _nozero_sgd(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 48, 5]), he)
    return _job(model, SGD(model.parameters(), 0.1), data.clusters(spread=2.0), seed, zero_grad=fixed)


@program("nozero_adam_cnn", "missing_zero_grad", also_ok=_BLOWN_UP, source="zero_grad forgotten, hidden by Adam")
def _nozero_adam(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    return _job(model, Adam(model.parameters(), 0.003), data.images(), seed, zero_grad=fixed)


@program("healthy_accumulation", source="gradients of four batches are added up on purpose")
def _accumulation(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 5])
    return _job(model, SGD(model.parameters(), 0.1), data.clusters(spread=2.0), seed, steps=400, accumulate=4, batch=16)


def _zero_in_place(job: Job, batch: Batch, observer: Observer, step: int) -> float:
    job.optimizer.zero_grad(set_to_none=False)
    return plain_step(job, batch, observer, step)


@program("healthy_full_batch", source="the same batch every step: successive gradients are alike, buffers are kept")
def _full_batch(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 5], nn.Tanh)
    optimizer = SGD(model.parameters(), 0.2)
    return _job(model, optimizer, data.clusters(spread=2.0), seed, batch=900, zero_grad=False, step_fn=_zero_in_place)


@program("flipped_maximize", "flipped_gradient", also_ok=_BLOWN_UP, source="SGD(maximize=True)")
def _maximize(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 5])
    return _job(model, SGD(model.parameters(), 0.02, maximize=not fixed), data.clusters(), seed)


@program("flipped_hook", "flipped_gradient", also_ok=_BLOWN_UP, source="TheDeepChecker: gradients with the wrong sign")
def _hook(seed: int, fixed: bool) -> Job:
    model = mlp([6, 32, 16, 1])
    if not fixed:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: -grad)  # type: ignore[no-untyped-call]
    return _job(model, Adam(model.parameters(), 0.001), data.slopes(), seed)


# ------------------------------------------------------------------------------------------------------ regularisation


@program("overreg_sgd_mlp", "over_regularisation", also_ok=_STUCK, source="TheDeepChecker over_regularization")
def _overreg(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 32, 5]), he)
    return _job(
        model, SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4 if fixed else 0.4), data.clusters(), seed
    )


@program("overreg_adamw_gpt", "over_regularisation", also_ok=_STUCK, source="weight_decay=30 in AdamW")
def _overreg_adamw(seed: int, fixed: bool) -> Job:
    model = GPT()
    optimizer = AdamW(model.parameters(), 0.003, weight_decay=0.1 if fixed else 30.0)
    return Job(model, optimizer, token_loss, _language(seed), 150)


class _Penalised:
    """A loss that also charges for the weights."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], strength: float) -> None:
        self.model, self.loss, self.strength = model, loss, strength

    def __call__(self, output: Any, target: Any) -> Tensor:
        return self.loss(output, target) + self.strength * sum(
            (p.square().sum() for p in self.model.parameters()), start=torch.zeros(())
        )


@program("overreg_penalty", "over_regularisation", also_ok=_STUCK, source="DeepCrime add_weights_regularisation")
def _overreg_penalty(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    loss = _Penalised(model, cross_entropy, 1e-5 if fixed else 0.3)
    return _job(model, SGD(model.parameters(), 0.05), data.images(), seed, loss_fn=loss)


@program("healthy_usual_decay", source="a usual weight decay: weights shrink a little, the model learns")
def _usual_decay(seed: int, fixed: bool) -> Job:
    model = mlp([20, 64, 32, 5], norm=True)
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-3)
    return _job(model, optimizer, data.clusters(spread=2.0), seed)


# ------------------------------------------------------------------------------------------------------------ clipping


@program("clip_tight_sgd", "clip_too_tight", also_ok=_STUCK, source="DEForm RGC: max_norm of 1e-4")
def _clip_sgd(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return _job(model, optimizer, data.images(), seed, clip=1.0 if fixed else 1e-4)


@program("clip_tight_gpt", "clip_too_tight", also_ok=_STUCK, source="DEForm RGC on a language model with SGD")
def _clip_gpt(seed: int, fixed: bool) -> Job:
    model = GPT()
    optimizer = SGD(model.parameters(), 0.5, momentum=0.9)
    return Job(model, optimizer, token_loss, _language(seed), 200, clip=1.0 if fixed else 5e-4)


@program(
    "healthy_clip_always_active", source="norms of 1 to 5 clipped at 1.0: usual for recurrent nets and transformers"
)
def _clip_active(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 32, 5]), he)
    return _job(model, SGD(model.parameters(), 0.1, momentum=0.9), data.clusters(spread=2.0), seed, clip=0.5)


@program("healthy_clip_under_adam", source="Adam divides by the gradient's size: a tight clip changes nothing")
def _clip_adam(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 5])
    return _job(model, Adam(model.parameters(), 0.005), data.clusters(), seed, clip=1e-2)


# ---------------------------------------------------------------------------------------------------------------- Adam


@program("adam_eps_huge", {"adam_epsilon_dominates", "lr_too_low"}, also_ok=_STUCK, source="Wortsman 2023; eps=1")
def _eps_huge(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    return _job(model, Adam(model.parameters(), 0.003, eps=1e-8 if fixed else 1.0), data.images(), seed)


@program(
    "adam_eps_small_loss", {"adam_epsilon_dominates", "lr_too_low"}, also_ok=_STUCK, source="a loss scaled by 1e-6"
)
def _eps_small_loss(seed: int, fixed: bool) -> Job:
    model = mlp([6, 48, 24, 1])
    optimizer = Adam(model.parameters(), 0.003, eps=1e-14 if fixed else 1e-6)
    return _job(model, optimizer, data.slopes(), seed, loss_fn=lambda o, t: 1e-8 * mse_loss(o, t))


@program("healthy_tiny_gradients", source="a loss scaled by 1e-4, and an eps that is smaller still")
def _tiny_gradients(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 5])
    optimizer = Adam(model.parameters(), 0.005, eps=1e-12)
    return _job(model, optimizer, data.clusters(), seed, loss_fn=lambda o, t: 1e-4 * cross_entropy(o, t))


def _arriving(seed: int) -> Iterator[Batch]:
    """Large features that mean nothing arrive three at a time, every fifty batches: Adam knows nothing of them."""
    g = torch.Generator().manual_seed(300 + seed)
    w = torch.randn(8, 1, generator=g) / 3
    for step in itertools.count():
        x = torch.randn(128, 32, generator=g)
        scale = torch.cat([torch.ones(8), torch.zeros(24)])
        if step >= 50:
            first = 8 + 3 * (step // 50 - 1) % 24
            scale[first : first + 3] = 15.0
        yield x * scale, torch.tanh(x[:, :8] @ w)


@program(
    "adam_second_moment_arrivals",
    {"adam_second_moment_underestimate", "loss_spikes"},
    also_ok=("bad_batches", "unnormalised_inputs", *_BLOWN_UP),
    source="Wortsman 2023, StableAdamW: the signal of a layer changes, and beta2 of 0.999 is slow to learn of it",
)
def _second_moment(seed: int, fixed: bool) -> Job:
    model = mlp([32, 48, 1])
    fill(model, he)
    with torch.no_grad():
        model[0].weight[:, 8:] = 0.0  # type: ignore[operator]
    optimizer = Adam(model.parameters(), 0.01 if fixed else 0.03, betas=(0.9, 0.95 if fixed else 0.999))
    return Job(model, optimizer, mse_loss, _arriving(seed), 400)
