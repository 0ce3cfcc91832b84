"""Everything that makes up one generated program, before it is built. A fault is a change to it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from programs.models import ARCHITECTURES, Architecture, adapted
from programs.tasks import TASKS, Data, Task

Batches = Iterator[tuple[Any, Any]]

OPTIMIZERS: Final[dict[str, tuple[Callable[..., Any], float, dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, 0.1, {}),
    "momentum": (torch.optim.SGD, 0.03, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, 0.03, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
    "adam": (torch.optim.Adam, 3e-3, {}),
    "adamw": (torch.optim.AdamW, 3e-3, {"weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, 3e-3, {}),
    "rmsprop": (torch.optim.RMSprop, 1e-3, {}),
    "adagrad": (torch.optim.Adagrad, 2e-2, {}),
    "adafactor": (torch.optim.Adafactor, 1e-2, {}),
}
PLAIN: Final = ("sgd", "momentum", "nesterov")
ADAPTIVE: Final = ("adam", "adamw", "nadam", "rmsprop", "adagrad", "adafactor")
FOR_TRANSFORMERS: Final = ("adam", "adamw", "nadam", "rmsprop", "adagrad")
ADAMS: Final = ("adam", "adamw", "nadam")

SCHEDULES: Final[dict[str, Callable[[int, int], float] | None]] = {
    "constant": None,
    "cosine": lambda i, n: 0.5 * (1 + math.cos(math.pi * min(i / n, 1.0))) + 0.02,
    "warmup": lambda i, n: min(1.0, (i + 1) / (0.1 * n)),
    "warmup_cosine": lambda i, n: min(1.0, (i + 1) / (0.1 * n)) * (0.55 + 0.45 * math.cos(math.pi * min(i / n, 1.0))),
    "steps": lambda i, n: 0.3 ** (3 * i // n),
}


@dataclass(frozen=True)
class Style:
    """How a user records: the calls that stand in the loop."""

    name: str
    logs: str = "step"
    """When the loss is logged: step, epoch, never."""
    loss: str = "loss"
    validates: str = ""
    """The name under which a validation loss is logged; empty for none."""
    batch: bool = False
    """Whether the loop calls sonde.batch."""
    functional: bool = False
    """Whether the loss is a function, not a module."""


STYLES: Final = {
    style.name: style
    for style in (
        Style("plain"),
        Style("silent", logs="never"),
        Style("silent_functional", logs="never", functional=True),
        Style("validated", validates="val_loss"),
        Style("batch", batch=True),
        Style("batch_validated", batch=True, validates="val/loss", loss="train/loss", functional=True),
        Style("epochs", logs="epoch", loss="train_loss", validates="val_loss"),
        Style("functional", functional=True, loss="train/loss"),
    )
}


@dataclass
class Setup:
    """A program: mostly what it is made of, and the few things that faults change."""

    architecture: Architecture
    task: Task
    optimizer: str
    schedule: str
    style: Style
    seed: int
    data: Data
    rate: float
    steps: int = 130
    batch: int = 32
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the architecture."""
    optim: dict[str, Any] = field(default_factory=dict)
    """Options of the optimizer, over its usual ones."""
    loss: Any = None
    edits: list[Callable[[nn.Module], object]] = field(default_factory=list)
    """Changes to the model once it is made, before the optimizer is."""
    stream: list[Callable[[Batches], Batches]] = field(default_factory=list)
    """Changes to the batches, in order."""
    lambda_lr: Callable[[int, int], float] | None = None
    """The factor on the learning rate: of step and number of steps."""
    groups: Callable[[nn.Module, float], list[Any]] | None = None
    """Parameters for the optimizer. None: all that are trainable."""
    shuffle: bool = True
    clip: float | None = None
    accumulate: int = 1
    zero_grad: bool = True
    eval_mode: bool = False
    keep: bool = False
    """Whether the loop keeps every loss with its graph."""
    after_backward: Callable[[nn.Module], object] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None
    """A module around the model."""


def compose(architecture: str, task: str, optimizer: str, schedule: str, style: str, seed: int) -> Setup:
    """A healthy program."""
    arch, what = ARCHITECTURES[architecture], TASKS[task]
    rate = OPTIMIZERS[optimizer][1] * arch.rate
    if optimizer in PLAIN and what.inputs != "image" and task in ("contrastive", "policy"):
        rate *= 3
    return Setup(
        arch, what, optimizer, schedule, STYLES[style], seed, what.data(seed % 7), rate,
        batch=what.batch, loss=what.loss(), lambda_lr=SCHEDULES[schedule],
    )  # fmt: skip


@dataclass
class Job:
    """A program, built."""

    setup: Setup
    model: nn.Module
    optimizer: Any
    scheduler: Any
    batches: Batches


def build(setup: Setup) -> Job:
    """Make model, optimizer and batches; the same seed gives faulty program and twin the same weights and order."""
    torch.manual_seed(1000 + setup.seed)
    model = _model(setup)
    for edit in setup.edits:
        edit(model)
    model = setup.wrap(model) if setup.wrap else model
    kind, _, usual = OPTIMIZERS[setup.optimizer]
    chosen = setup.groups(model, setup.rate) if setup.groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = kind(chosen, lr=setup.rate, **{**usual, **setup.optim})
    scheduler = None
    if setup.lambda_lr is not None:
        factor, steps = setup.lambda_lr, setup.steps
        scheduler = LambdaLR(optimizer, lambda i: factor(i, steps))
    batches = _endless(setup)
    for change in setup.stream:
        batches = change(batches)
    return Job(setup, model, optimizer, scheduler, batches)


def _model(setup: Setup) -> nn.Module:
    name, options = setup.architecture.name, dict(setup.options)
    if not name.startswith("lora"):
        return setup.architecture.make(setup.task, **options)
    # Adapters need a model that knows a related task.
    base = ARCHITECTURES[name.removeprefix("lora_")]
    kept = {key: options.pop(key) for key in ("rank", "alpha", "zero") if key in options}
    model = _pretrained(base.make(setup.task, **options), setup.task, setup.seed)
    names = ("*",) if name == "lora_mlp" else ("q_proj", "v_proj", "0", "2")
    return adapted(model, names, **{"rank": 4, "alpha": 8.0, "zero": False, **kept})


def _pretrained(model: nn.Module, task: Task, seed: int) -> nn.Module:
    data, loss_fn = task.data(seed % 7), task.loss()
    y = (data.y + 1) % task.outputs if task.is_class else -data.y
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(150):
        rows = torch.randint(len(data.x), (task.batch,), generator=order)
        optimizer.zero_grad()
        loss_fn(model(data.x[rows]), y[rows]).backward()
        optimizer.step()
    return copy.deepcopy(model)


def _endless(setup: Setup) -> Batches:
    order = torch.Generator().manual_seed(9000 + setup.seed)
    x, y = setup.data.x, setup.data.y
    size = min(setup.batch, len(x))
    while True:
        rows = torch.randperm(len(x), generator=order) if setup.shuffle else torch.arange(len(x))
        for start in range(0, len(x) - size + 1, size):
            chosen = rows[start : start + size]
            yield x[chosen], y[chosen]
