"""Layers that do not train by mistake, in every way in which it happens; and layers frozen on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Adam, AdamW, Optimizer

from faults import data
from faults.gpt import GPT
from faults.program import Batch, Job, Observer, endless, program
from faults.stacks import cnn, mlp, token_loss

FROZEN = "frozen_layers"
_SLOW = (
    *("underfitting", "vanishing_gradients", "lr_too_low", "optimizer_missing_params", "detached_graph"),
    *("rnn_vanishing_temporal", "adam_epsilon_dominates", "bottleneck_layer", "loss_plateau"),
)


def freeze(parts: Iterable[nn.Module | nn.Parameter]) -> None:
    for part in parts:
        part.requires_grad_(False)


def trained(model: nn.Module, batches: Iterable[Batch], loss: Callable[..., Tensor] = cross_entropy) -> None:
    """Pre-train a model for a moment, unrecorded."""
    optimizer = Adam(model.parameters(), 3e-3)
    for (x, y), _ in zip(batches, range(120), strict=False):
        optimizer.zero_grad()
        loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _job(model: nn.Module, seed: int, split: data.Split | None = None, **options: Any) -> Job:
    (x, y), _ = split or data.clusters()
    optimizer = options.pop("optimizer", None) or Adam([p for p in model.parameters() if p.requires_grad], 2e-3)
    return Job(model, optimizer, cross_entropy, endless(x, y, 50, seed), 150, **options)


@program("frozen_one_convolution", FROZEN, also_ok=_SLOW, source="newcomers' programs: a loop that froze one too many")
def _one_conv(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    freeze([] if fixed else convolutions[1:2])
    return _job(model, seed, data.images())


@program("frozen_all_but_the_stem", FROZEN, also_ok=_SLOW, source="newcomers' programs: the condition is inverted")
def _but_stem(seed: int, fixed: bool) -> Job:
    model = cnn((8, 16), 32, 8)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    freeze([] if fixed else model.parameters())
    convolutions[0].requires_grad_(True)
    return _job(model, seed, data.images())


@program("frozen_three_of_four_hidden", FROZEN, also_ok=_SLOW, source="newcomers' programs, read as too simple a model")
def _three(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 48, 48, 48, 5])
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    freeze([] if fixed else linear[1:4])
    return _job(model, seed)


@program("frozen_block_of_a_gpt", FROZEN, also_ok=_SLOW, source="newcomers' programs: block 0 of a GPT")
def _block(seed: int, fixed: bool) -> Job:
    model = GPT()
    freeze([] if fixed else [model.blocks[0]])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    return Job(model, optimizer, token_loss, data.language(seed, batch=16, length=16), 120)


@program("frozen_fresh_head", FROZEN, also_ok=_SLOW, source="a new head, frozen by the loop for the body")
def _head(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 48, 5])
    freeze([] if fixed else list(model.modules())[-1:])
    return _job(model, seed)


@program("frozen_weights_by_a_name_filter", FROZEN, also_ok=_SLOW, source='"coder" is in "decoder" as in "encoder"')
def _filter(seed: int, fixed: bool) -> Job:
    model = nn.Sequential()
    model.add_module("encoder", mlp([20, 48, 48]))
    model.add_module("between", nn.ReLU())
    model.add_module("decoder", nn.Linear(48, 5))
    freeze(p for name, p in model.named_parameters() if not fixed and "coder" in name and "weight" in name)
    return _job(model, seed)


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(24, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.tokens(x))[0])


@program("frozen_lstm", FROZEN, also_ok=_SLOW, source="a recurrent body frozen with the embeddings it was loaded with")
def _lstm(seed: int, fixed: bool) -> Job:
    model = _Reader()
    freeze([] if fixed else [model.body])
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 3e-3)
    return Job(model, optimizer, token_loss, data.language(seed, batch=16, length=16), 120)


@program("frozen_by_a_rate_of_0", FROZEN, also_ok=_SLOW, source="a parameter group left with a rate of 0")
def _rate(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 48, 48, 5])
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    still = [p for module in linear[:2] for p in module.parameters()]
    rest = [p for module in linear[2:] for p in module.parameters()]
    groups: list[dict[str, Any]] = [{"params": still, "lr": 2e-3 if fixed else 0.0}, {"params": rest}]
    optimizer: Optimizer = Adam(groups, 2e-3)
    return _job(model, seed, optimizer=optimizer)


def _cleared(job: Job, batch: Batch, observer: Observer, step: int) -> float:
    """A step that clears the gradients of two weights: only weight decay still changes them."""
    x, y = batch
    job.optimizer.zero_grad()
    output = job.model(x)
    loss = job.loss_fn(output, y)
    observer.after_forward(step, output, loss)
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in [p for p in job.model.parameters() if p.ndim == 2][:2]:
        assert parameter.grad is not None
        parameter.grad.zero_()
    observer.after_backward(step)
    observer.before_optim(step)
    job.optimizer.step()
    return loss.item()


@program("frozen_but_for_weight_decay", FROZEN, also_ok=_SLOW, source="a mask clears the gradients; decay goes on")
def _decay(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 48, 5])
    optimizer = AdamW(model.parameters(), 2e-3, weight_decay=0.1)
    return _job(model, seed, optimizer=optimizer, step_fn=None if fixed else _cleared)


@program("left_out_in_the_middle", "optimizer_missing_params", also_ok=(FROZEN, *_SLOW), source="a list with a gap")
def _left_out(seed: int, fixed: bool) -> Job:
    model = mlp([20, 48, 48, 48, 5])
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    chosen = linear if fixed else [linear[0], linear[3]]
    optimizer = Adam([p for module in chosen for p in module.parameters()], 2e-3)
    return _job(model, seed, optimizer=optimizer)


# ---------------------------------------------------------------------------------------------------- frozen on purpose


@program("h_frozen_first_layers", source="fine-tuning: the first half of a trained network stays as it is")
def _first_layers(seed: int, fixed: bool) -> Job:
    model, split = mlp([20, 48, 48, 48, 5]), data.clusters()
    trained(model, endless(*split[0], 50, seed))
    freeze([module for module in model.modules() if isinstance(module, nn.Linear)][:2])
    return _job(model, seed, split)


@program("h_frozen_trained_block", source="fine-tuning: the first block of a trained GPT stays as it is")
def _trained_block(seed: int, fixed: bool) -> Job:
    model = GPT()
    trained(model, data.language(seed, batch=16, length=16), token_loss)
    freeze([model.blocks[0]])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    return Job(model, optimizer, token_loss, data.language(seed + 1, batch=16, length=16), 120)


@program("h_frozen_embeddings", source="word vectors that stay as they are, even untrained ones")
def _embeddings(seed: int, fixed: bool) -> Job:
    model = _Reader()
    freeze([model.tokens])
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 5e-3)
    return Job(model, optimizer, token_loss, data.language(seed, batch=16, length=16), 150)


class _WithTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp([20, 48, 48, 5]), mlp([20, 48, 48, 5])
        self.teacher.load_state_dict(self.student.state_dict())
        freeze([self.teacher])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        out: Tensor = self.student(x) + 0 * target
        return out


@program("h_frozen_teacher", source="a copy at the start: the target network of self-distillation")
def _teacher(seed: int, fixed: bool) -> Job:
    return _job(_WithTeacher(), seed)
