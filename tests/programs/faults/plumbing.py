"""Plumbing: untrained parameters, graphs that are cut or kept, the wrong mode; and the same done on purpose."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from faults import data
from faults.program import Batch, Job, Observer, endless, evaluate, plain_step, program
from faults.stacks import cnn, fill, he, mlp, normal, xavier

_IDLE = (
    "underfitting",
    "vanishing_gradients",
    "frozen_layers",
    "optimizer_missing_params",
    "detached_graph",
    "lr_too_low",
)


def _job(model: nn.Module, optimizer: Optimizer, split: data.Split, seed: int, steps: int = 200) -> Job:
    (x, y), val = split
    is_class = y.dtype == torch.long
    loss: nn.Module = nn.CrossEntropyLoss() if is_class else nn.MSELoss()
    return Job(
        model, optimizer, loss, endless(x, y, 50, seed), steps, val=val, val_every=steps // 5, is_accuracy=is_class
    )


def _freeze(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)


class Encoded(nn.Module):
    """A body and a head; between them something may happen to the hidden state."""

    def __init__(self, body: nn.Module, head: nn.Module, between: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.body, self.head, self.between = body, head, between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(self.body(x)))  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------------------- frozen


@program("frozen_everything_but_norms", "frozen_layers", also_ok=_IDLE, source="TrainCheck: pytorch-forum-84911")
def _frozen_but_norms(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 32, 32, 5], norm=True), he)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not fixed:
            _freeze(module)
    return _job(model, Adam(model.parameters(), 3e-3), data.clusters(spread=2.0), seed)


@program("frozen_head", "frozen_layers", also_ok=_IDLE, source="a name filter that also caught the classifier")
def _frozen_head(seed: int, fixed: bool) -> Job:
    model = Encoded(mlp([20, 32, 6], nn.Tanh), nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 5)))
    if not fixed:
        _freeze(model.head)
        _freeze(model.body[0])  # type: ignore[index]
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    return _job(model, optimizer, data.clusters(spread=2.0), seed)


@program("h_transfer_learning_head_only")
def _transfer(seed: int, fixed: bool) -> Job:
    split = data.clusters()
    body = nn.Sequential(*mlp([20, 64, 32]).children(), nn.ReLU())
    teacher = Encoded(body, nn.Linear(32, 5))
    optimizer = Adam(teacher.parameters(), 3e-3)
    for (x, y), _ in zip(endless(*split[0], 50, seed), range(100), strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(teacher(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    _freeze(body)
    model = Encoded(body, nn.Linear(32, 5))
    return _job(model, Adam(model.head.parameters(), 1e-2), split, seed)


# ------------------------------------------------------------------------------------------------------ in no optimizer


@program("optimizer_before_new_head", "optimizer_missing_params", also_ok=_IDLE, source="the optimizer was built first")
def _new_head(seed: int, fixed: bool) -> Job:
    model = Encoded(nn.Sequential(*fill(cnn([8, 16], 32, 32), he).children(), nn.ReLU()), nn.Linear(32, 10))
    early = Adam(model.parameters(), 2e-3)
    model.head = nn.Linear(32, 8)
    late = Adam(model.parameters(), 2e-3)
    return _job(model, late if fixed else early, data.images(), seed)


@program("optimizer_only_head", "optimizer_missing_params", also_ok=_IDLE, source="TrainCheck: parameters left out")
def _only_head(seed: int, fixed: bool) -> Job:
    body = nn.Sequential(*fill(mlp([20, 24, 8], nn.Tanh), normal(0.05)).children(), nn.Tanh())
    model = Encoded(body, nn.Linear(8, 5))
    optimizer = SGD((model if fixed else model.head).parameters(), 0.1, momentum=0.9)
    return _job(model, optimizer, data.clusters(), seed)


@program("h_two_parameter_groups")
def _two_groups(seed: int, fixed: bool) -> Job:
    model = Encoded(nn.Sequential(*fill(mlp([20, 32, 16]), he).children(), nn.ReLU()), nn.Linear(16, 5))
    groups = [{"params": model.body.parameters(), "lr": 3e-3}, {"params": model.head.parameters(), "lr": 1e-2}]
    return _job(model, Adam(groups), data.clusters(), seed)


# ------------------------------------------------------------------------------------------------------------ cut graph


@program(
    "detached_body_mlp", "detached_graph", also_ok=_IDLE, source="PyTorch forum: .detach() between encoder and head"
)
def _detached_body(seed: int, fixed: bool) -> Job:
    body = nn.Sequential(*fill(mlp([20, 24, 8], nn.Tanh), normal(0.05)).children(), nn.Tanh())
    model = Encoded(body, nn.Linear(8, 5), (lambda h: h) if fixed else torch.detach)
    return _job(model, Adam(model.parameters(), 5e-3), data.clusters(), seed)


@program("detached_by_data_conv", "detached_graph", also_ok=_IDLE, source="PyTorch forum: .data instead of the tensor")
def _detached_conv(seed: int, fixed: bool) -> Job:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
    head = mlp([36, 32, 8])
    model = Encoded(body, head, (lambda h: h) if fixed else (lambda h: h.data))
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), data.images(), seed, 250)


class _TwoHeads(nn.Module):
    """Only one of the heads is used."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*fill(mlp([20, 32, 16]), he).children(), nn.ReLU())
        self.head, self.spare = nn.Linear(16, 5), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


@program("h_spare_head")
def _spare_head(seed: int, fixed: bool) -> Job:
    model = _TwoHeads()
    return _job(model, Adam(model.parameters(), 3e-3), data.clusters(), seed)


# ----------------------------------------------------------------------------------------------------------- wrong mode


def _forgetful(job: Job, batch: Batch, observer: Observer, step: int) -> float:
    """Validates in eval mode and does not go back."""
    if step and step % 20 == 0:
        job.model.eval()
        evaluate(job)
    return plain_step(job, batch, observer, step)


@program("eval_after_validation", "eval_mode_training", also_ok=("overfitting",), source="model.train() forgotten")
def _eval_after(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(
        *[nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 5)],
    )
    job = _job(model, Adam(model.parameters(), 3e-3), data.clusters(), seed)
    job.step_fn = None if fixed else _forgetful
    return job


@program("eval_from_the_start_conv", "eval_mode_training", also_ok=("init_scale",), source="model.train() forgotten")
def _eval_start(seed: int, fixed: bool) -> Job:
    model = nn.Sequential(
        *[nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten()],
        *[nn.Dropout(0.2), nn.Linear(72, 8)],
    )
    model.train(fixed)
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), data.images(), seed, 200)


class _FixedNorm(nn.BatchNorm1d):
    """Keeps its averages whatever the mode of the model, as in fine-tuned detectors."""

    def train(self, mode: bool = True) -> _FixedNorm:
        return super().train(False)


@program("h_frozen_batch_norm")
def _frozen_norm(seed: int, fixed: bool) -> Job:
    norm = _FixedNorm(48)
    _freeze(norm)
    model = nn.Sequential(nn.Linear(20, 48), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 5))
    norm.train()
    return _job(model, Adam([p for p in model.parameters() if p.requires_grad], 3e-3), data.clusters(), seed)


# ---------------------------------------------------------------------------------------------------------- kept memory


def _keeping(kept: list[object], what: Callable[[Tensor, Tensor], object]) -> Callable[..., float]:
    def step(job: Job, batch: Batch, observer: Observer, number: int) -> float:
        job.optimizer.zero_grad()
        output = job.model(batch[0])
        loss = job.loss_fn(output, batch[1])
        observer.after_forward(number, output, loss)
        loss.backward()  # type: ignore[no-untyped-call]
        observer.after_backward(number)
        observer.before_optim(number)
        job.optimizer.step()
        kept.append(what(output, loss))
        return loss.item()

    return step


@program("leak_losses_kept", "memory_leak", source="PyTorch FAQ: total_loss += loss keeps every graph")
def _losses_kept(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 128, 64, 5]), he)
    job = _job(model, Adam(model.parameters(), 2e-3), data.clusters(), seed)
    kept: list[object] = []
    job.step_fn = _keeping(kept, lambda _, loss: loss.item() if fixed else loss)
    return job


@program("leak_outputs_kept_conv", "memory_leak", source="outputs.append(out) for a later plot")
def _outputs_kept(seed: int, fixed: bool) -> Job:
    model = fill(cnn([16, 32], 64, 8), he)
    job = _job(model, SGD(model.parameters(), 0.05, momentum=0.9), data.images(), seed, 120)
    kept: list[object] = []
    job.step_fn = _keeping(kept, lambda output, _: None if fixed else output)
    return job


@program("h_short_history_of_losses")
def _short_history(seed: int, fixed: bool) -> Job:
    """The last few losses stay alive on purpose: a running mean."""
    model = fill(mlp([20, 64, 5]), he)
    job = _job(model, Adam(model.parameters(), 2e-3), data.clusters(), seed)
    kept: list[object] = []

    def remember(output: Tensor, loss: Tensor) -> object:
        del kept[:-2]
        return loss

    job.step_fn = _keeping(kept, remember)
    return job


@program("h_xavier_tanh_plain")
def _plain(seed: int, fixed: bool) -> Job:
    model = fill(mlp([20, 32, 32, 5], nn.Tanh), xavier)
    return _job(model, SGD(model.parameters(), 0.05, momentum=0.9), data.clusters(), seed)
