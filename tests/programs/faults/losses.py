"""Losses that do not fit what the model puts out: wrong pairs, shapes that broadcast, sums where means were meant."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from faults import data
from faults.program import Job, endless, program
from faults.stacks import cnn, fill, he, mlp, xavier

PAIR = "wrong_loss_activation_pair"
_STUCK = ("underfitting", "vanishing_gradients", "saturated_activations", "lr_too_low", "constant_output")


class Then(nn.Module):
    """A model with a plain function after it: an activation that no list of modules shows."""

    def __init__(self, body: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.function = body, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.body(x))


def _job(
    model: nn.Module, optimizer: Optimizer, loss: Callable[..., Tensor], split: data.Split, seed: int, steps: int = 200
) -> Job:
    (x, y), val = split
    is_class = y.dtype == torch.long
    return Job(
        model, optimizer, loss, endless(x, y, 50, seed), steps, val=val, val_every=steps // 5, is_accuracy=is_class
    )


def _binary(split: data.Split) -> data.Split:
    """The first half of the classes against the rest, as a column of 0 and 1."""
    (x, y), (xv, yv) = split
    middle = int(y.max()) // 2
    return (x, (y > middle).float()[:, None]), (xv, (yv > middle).float()[:, None])


def _targets(split: data.Split, scale: float, shift: float = 0.0) -> data.Split:
    (x, y), (xv, yv) = split
    return (x, scale * y + shift), (xv, scale * yv + shift)


# --------------------------------------------------------------------------------------- two softmaxes, wrong softmaxes


@program("pair_functional_double_softmax", PAIR, also_ok=_STUCK, source="UMLAUT, TheDeepChecker: redundant softmax")
def _double_softmax(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 48, 5]), he)
    model = body if fixed else Then(body, lambda h: functional.softmax(h, -1))
    return _job(model, Adam(model.parameters(), 2e-3), nn.CrossEntropyLoss(), data.clusters(), seed)


@program("pair_softmax_inside_loss", PAIR, also_ok=_STUCK, source="TheDeepChecker: softmax fed to a softmax loss")
def _softmax_in_loss(seed: int, fixed: bool) -> Job:
    model = fill(cnn([8, 16], 32, 8), he)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output if fixed else output.softmax(-1), target)

    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), loss, data.images(), seed)


@program("pair_softmax_wrong_dim", PAIR, also_ok=_STUCK, source="PyTorch forum: nn.Softmax(dim=0) over the batch")
def _wrong_dim(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 32, 5]), he)
    model = nn.Sequential(*body.children(), nn.Softmax(-1 if fixed else 0))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.nll_loss(output.clamp_min(1e-8).log(), target)

    return _job(model, Adam(model.parameters(), 3e-3), loss, data.clusters(), seed)


@program("pair_softmax_one_unit", PAIR, also_ok=(*_STUCK, "frozen_layers"), source="DeepFD: Dense(1, softmax)")
def _one_unit(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 24, 12, 1]), he)
    model = nn.Sequential(*body.children(), nn.Sigmoid() if fixed else nn.Softmax(-1))
    return _job(model, SGD(model.parameters(), 0.1, momentum=0.9), nn.BCELoss(), _binary(data.clusters()), seed)


@program(
    "pair_sigmoid_into_logits_loss", PAIR, also_ok=_STUCK, source="PyTorch forum: sigmoid before BCEWithLogitsLoss"
)
def _sigmoid_logits(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 32, 1]), he)
    model = body if fixed else Then(body, torch.sigmoid)
    return _job(model, Adam(model.parameters(), 3e-3), nn.BCEWithLogitsLoss(), _binary(data.clusters()), seed)


@program("pair_sigmoid_into_cross_entropy", PAIR, also_ok=_STUCK, source="UMLAUT: sigmoid output with softmax loss")
def _sigmoid_cross_entropy(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 32, 5]), he)
    model = body if fixed else nn.Sequential(*body.children(), nn.Sigmoid())
    return _job(model, Adam(model.parameters(), 3e-3), nn.CrossEntropyLoss(), data.clusters(), seed, 250)


@program("pair_relu_on_logits", PAIR, also_ok=(*_STUCK, "dead_relu"), source="DeepLocalize: relu on the last layer")
def _relu_logits(seed: int, fixed: bool) -> Job:
    body = fill(cnn([8, 16], 32, 8), he)
    model = body if fixed else Then(body, functional.relu)
    return _job(model, Adam(model.parameters(), 3e-3), nn.CrossEntropyLoss(), data.images(), seed)


@program("pair_nll_on_logits", PAIR, also_ok=("exploding_gradients", "lr_too_high", "output_logit_growth", "nan_inf"))
def _nll_on_logits(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 48, 5]), he)
    model = nn.Sequential(*body.children(), nn.LogSoftmax(-1)) if fixed else body
    return _job(model, Adam(model.parameters(), 2e-3), nn.NLLLoss(), data.clusters(), seed)


# -------------------------------------------------------------------------------- outputs that cannot reach the targets


@program(
    "pair_tanh_output_regression",
    PAIR,
    also_ok=(*_STUCK, "unnormalised_targets"),
    source="DeepFD: tanh on a regression",
)
def _tanh_regression(seed: int, fixed: bool) -> Job:
    body = fill(mlp([6, 64, 32, 1]), he)
    model = body if fixed else nn.Sequential(*body.children(), nn.Tanh())
    split = _targets(data.slopes(), 3.0)
    return _job(model, Adam(model.parameters(), 3e-3), nn.MSELoss(), split, seed, 300)


@program("pair_sigmoid_output_regression", PAIR, also_ok=(*_STUCK, "unnormalised_targets"), source="DeepFD SO-48934338")
def _sigmoid_regression(seed: int, fixed: bool) -> Job:
    body = fill(mlp([6, 64, 32, 1]), he)
    model = body if fixed else Then(body, torch.sigmoid)
    split = _targets(data.slopes(), 2.0, 3.0)
    return _job(model, Adam(model.parameters(), 3e-3), nn.SmoothL1Loss(), split, seed, 300)


@program("pair_relu_output_regression", PAIR, also_ok=(*_STUCK, "dead_relu"), source="DeepFD SO-48251943")
def _relu_regression(seed: int, fixed: bool) -> Job:
    body = fill(mlp([6, 64, 32, 1], nn.Tanh), xavier)
    model = body if fixed else Then(body, functional.relu)
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), nn.MSELoss(), data.slopes(), seed, 300)


@program("pair_mse_on_class_numbers", PAIR, also_ok=("underfitting",), source="DeepFD: mse on class numbers")
def _mse_class_numbers(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 48, 5 if fixed else 1]), he)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (
            functional.cross_entropy(output, target)
            if fixed
            else functional.mse_loss(output.squeeze(-1), target.float())
        )

    return _job(model, Adam(model.parameters(), 2e-3), loss, data.clusters(), seed, 250)


@program(
    "pair_mse_one_hot_linear_high_lr",
    {PAIR, "lr_too_high", "missing_nonlinearity"},
    also_ok=("exploding_gradients", "nan_inf", "loss_spikes", "underfitting", "init_scale"),
    source="DeepLocalize SO-48385830",
)
def _mse_one_hot(seed: int, fixed: bool) -> Job:
    model = mlp([20, 30, 5], nn.ReLU if fixed else nn.Identity)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (
            functional.cross_entropy(output, target)
            if fixed
            else functional.mse_loss(output, functional.one_hot(target, 5).float())
        )

    return _job(model, SGD(model.parameters(), 0.1 if fixed else 3.0), loss, data.clusters(), seed, 300)


@program(
    "pair_softmax_on_many_labels",
    PAIR,
    also_ok=("underfitting",),
    source="softmax where labels do not exclude each other",
)
def _softmax_multi_label(seed: int, fixed: bool) -> Job:
    (x, _), (xv, _) = data.clusters()
    w = torch.randn(20, 6, generator=torch.Generator().manual_seed(2))
    body = fill(mlp([20, 48, 6]), he)
    model = nn.Sequential(*body.children(), nn.Sigmoid() if fixed else nn.Softmax(-1))
    split = ((x, (x @ w > 0).float()), (xv, (xv @ w > 0).float()))
    return _job(model, Adam(model.parameters(), 3e-3), nn.BCELoss(), split, seed)


# --------------------------------------------------------------------------------------------------- healthy neighbours


@program("h_log_softmax_into_cross_entropy")
def _log_softmax(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 48, 5]), he)
    model = nn.Sequential(*body.children(), nn.LogSoftmax(-1))
    return _job(model, Adam(model.parameters(), 2e-3), nn.CrossEntropyLoss(), data.clusters(), seed)


@program("h_brier_score")
def _brier(seed: int, fixed: bool) -> Job:
    body = fill(mlp([20, 48, 5]), he)
    model = nn.Sequential(*body.children(), nn.Softmax(-1))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, functional.one_hot(target, 5).float())

    return _job(model, Adam(model.parameters(), 3e-3), loss, data.clusters(), seed)


@program("h_one_hot_regression_trains", source="Hui and Belkin 2021: square loss for classification works")
def _square_loss(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 5]), he)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, functional.one_hot(target, 5).float())

    return _job(model, Adam(model.parameters(), 3e-3), loss, data.clusters(), seed, 300)


@program("h_sigmoid_output_square_loss")
def _sigmoid_square(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(*fill(mlp([20, 48, 1]), he).children(), nn.Sigmoid())
    return _job(model, Adam(model.parameters(), 3e-3), nn.MSELoss(), _binary(data.clusters()), seed)


@program("h_softplus_output_positive_targets")
def _positive(seed: int, fixed: bool) -> Job:
    (x, y), (xv, yv) = data.slopes()
    model = nn.Sequential(*fill(mlp([6, 64, 32, 1]), he).children(), nn.ReLU())
    nn.init.constant_(model[-2].bias, 1.0)  # type: ignore[arg-type]
    split = ((x, functional.softplus(2 * y)), (xv, functional.softplus(2 * yv)))
    return _job(model, Adam(model.parameters(), 3e-3), nn.MSELoss(), split, seed, 300)


@program("h_pixelwise_log_softmax")
def _pixelwise(seed: int, fixed: bool) -> Job:
    (x, _), (xv, _) = data.images(600)
    model = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 3, 3, padding=1), nn.LogSoftmax(1))
    split = ((x, _level(x)), (xv, _level(xv)))
    (xt, yt), val = split
    return Job(
        model, Adam(model.parameters(), 5e-3), nn.NLLLoss(), endless(xt, yt, 50, seed), 150, val=val, val_every=50
    )


def _level(images: Tensor) -> Tensor:
    """Dark, medium or bright, of the mean over a small neighbourhood of each pixel."""
    mean = functional.avg_pool2d(images, 3, stride=1, padding=1)[:, 0]
    return (mean > 0).long() + (mean > 0.7).long()


# --------------------------------------------------------------------------------------------------- shapes, reductions


def _quiet(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The warning of torch that such programs drown in their output."""

    def silent(output: Tensor, target: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return loss(output, target)

    return silent


def _flat(split: data.Split) -> data.Split:
    (x, y), (xv, yv) = split
    return (x, y[:, 0]), (xv, yv[:, 0])


@program("broadcast_mse_column_row", "loss_shape_broadcast", also_ok=("underfitting", "constant_output"))
def _broadcast_mse(seed: int, fixed: bool) -> Job:
    body = fill(mlp([6, 48, 24, 1]), he)
    model = Then(body, lambda h: h.squeeze(-1)) if fixed else body
    return _job(model, Adam(model.parameters(), 3e-3), _quiet(functional.mse_loss), _flat(data.slopes()), seed, 250)


@program("broadcast_smooth_l1_sgd", "loss_shape_broadcast", also_ok=("underfitting", "constant_output"))
def _broadcast_smooth(seed: int, fixed: bool) -> Job:
    body = fill(mlp([6, 64, 1], nn.Tanh), xavier)
    model = Then(body, lambda h: h.squeeze(-1)) if fixed else body
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    return _job(model, optimizer, _quiet(functional.smooth_l1_loss), _flat(data.slopes()), seed, 250)


_TOO_LARGE = (
    "lr_too_high",
    "exploding_gradients",
    "loss_oscillation",
    "loss_spikes",
    "dead_relu",
    "nan_inf",
    "underfitting",
)


@program("sum_cross_entropy_sgd", "loss_reduction_sum", also_ok=_TOO_LARGE, source="TheDeepChecker: loss not averaged")
def _sum_cross_entropy(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 32, 5]), he)
    loss = nn.CrossEntropyLoss(reduction="mean" if fixed else "sum")
    return _job(model, SGD(model.parameters(), 0.1), loss, data.clusters(), seed)


@program("sum_mse_momentum", "loss_reduction_sum", also_ok=_TOO_LARGE, source="TheDeepChecker: loss not averaged")
def _sum_mse(seed: int, fixed: bool) -> Job:
    model = fill(mlp([6, 64, 1]), he)
    loss = nn.MSELoss(reduction="mean" if fixed else "sum")
    return _job(model, SGD(model.parameters(), 0.02, momentum=0.9), loss, data.slopes(), seed)


@program("h_sum_divided_by_batch")
def _sum_divided(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 5]), he)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, reduction="sum") / len(target)

    return _job(model, SGD(model.parameters(), 0.1), loss, data.clusters(), seed)


@program("h_sum_with_fitting_rate")
def _sum_tuned(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 64, 5]), he)
    loss = nn.CrossEntropyLoss(reduction="sum")
    return _job(model, SGD(model.parameters(), 0.002), loss, data.clusters(), seed)
