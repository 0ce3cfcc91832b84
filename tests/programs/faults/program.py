"""A training program whose fault is known, and the plain loop that trains it. Knows nothing of what observes it."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

Batch = tuple[Any, Any]


@dataclass(slots=True)
class Job:
    """One training run, ready to go."""

    model: nn.Module
    optimizer: Any
    """A torch optimizer, or a dict of them."""
    loss_fn: Callable[[Any, Any], Tensor]
    batches: Iterable[Batch]
    steps: int
    zero_grad: bool = True
    clip: float | None = None
    scheduler: Any = None
    accumulate: int = 1
    step_fn: Callable[[Job, Batch, Observer, int], float] | None = None
    val: Batch | None = None
    val_every: int = 0
    is_accuracy: bool = False
    """Whether validation also logs an accuracy."""


@dataclass(frozen=True, slots=True)
class Program:
    """A job and what is wrong with it. `make(seed, fixed)` builds it, with the fault or without."""

    id: str
    make: Callable[[int, bool], Job]
    labels: frozenset[str]
    """Root causes; none for a healthy control."""
    also_ok: frozenset[str]
    """True symptoms: neither rewarded nor punished."""
    has_twin: bool
    where: str | None = None
    """The module or parameter the fault sits in."""
    source: str = ""

    def build(self, seed: int = 0, *, fixed: bool = False) -> Job:
        torch.manual_seed(1000 + seed)
        return self.make(seed, fixed)


REGISTRY: Final[dict[str, Program]] = {}


def program(
    id: str,
    labels: str | Iterable[str] = (),
    *,
    also_ok: Iterable[str] = (),
    twin: bool = True,
    where: str | None = None,
    source: str = "",
) -> Callable[[Callable[[int, bool], Job]], Program]:
    """Register a program. No labels: a healthy control, built to tempt a naive rule."""

    def register(make: Callable[[int, bool], Job]) -> Program:
        assert id not in REGISTRY, f"two programs named {id}"
        roots = frozenset({labels} if isinstance(labels, str) else labels)
        REGISTRY[id] = Program(id, make, roots, frozenset(also_ok), twin and bool(roots), where, source)
        return REGISTRY[id]

    return register


@cache
def programs() -> tuple[Program, ...]:
    """Every program of this package."""
    import faults

    for module in sorted(info.name for info in pkgutil.iter_modules(faults.__path__)):
        importlib.import_module(f"{faults.__name__}.{module}")
    return tuple(REGISTRY.values())


class Observer:
    """The description of a training run; override what is needed."""

    def start(self, model: nn.Module, optimizer: Any, loss_fn: Any, total_steps: int, val: Any = None) -> None: ...
    def before_step(self, step: int, batch: Batch) -> None: ...
    def after_forward(self, step: int, output: Any, loss: Tensor) -> None: ...
    def after_backward(self, step: int) -> None: ...
    def before_optim(self, step: int) -> None: ...
    def after_step(self, step: int, loss: float) -> None: ...
    def validation(self, step: int, metrics: dict[str, float]) -> None: ...
    def finish(self) -> Any: ...


def train(job: Job, observer: Observer | None = None, *, max_bad: int = 15) -> Any:
    """Train to the end, or until the loss was not finite for `max_bad` steps running."""
    observer = observer or Observer()
    observer.start(job.model, job.optimizer, job.loss_fn, job.steps, val=job.val)
    batches = iter(job.batches)
    num_bad = 0
    for step in range(job.steps):
        batch = next(batches)
        observer.before_step(step, batch)
        loss = (job.step_fn or plain_step)(job, batch, observer, step)
        observer.after_step(step, loss)
        if job.val is not None and job.val_every and (step + 1) % job.val_every == 0:
            observer.validation(step, evaluate(job))
        num_bad = 0 if math.isfinite(loss) else num_bad + 1
        if num_bad >= max_bad:
            break
    return observer.finish()


def plain_step(job: Job, batch: Batch, observer: Observer, step: int) -> float:
    """Forward, backward, and an optimizer step every `accumulate` batches."""
    x, y = batch
    if job.zero_grad and step % job.accumulate == 0:
        job.optimizer.zero_grad(set_to_none=True)
    output = job.model(x)
    loss = job.loss_fn(output, y) / job.accumulate
    observer.after_forward(step, output, loss)
    loss.backward()  # type: ignore[no-untyped-call]
    observer.after_backward(step)
    if (step + 1) % job.accumulate == 0:
        if job.clip is not None:
            nn.utils.clip_grad_norm_([p for p in job.model.parameters() if p.grad is not None], job.clip)
        observer.before_optim(step)
        job.optimizer.step()
        if job.scheduler is not None:
            job.scheduler.step()
    return loss.item() * job.accumulate


def evaluate(job: Job) -> dict[str, float]:
    """Loss, and accuracy where it has a meaning, on the held-out batch."""
    assert job.val is not None
    x, y = job.val
    was_training = job.model.training
    job.model.eval()
    with torch.no_grad():
        output = job.model(x)
        metrics = {"val_loss": job.loss_fn(output, y).item()}
    job.model.train(was_training)
    if job.is_accuracy:
        guess = output.argmax(-1) if output.shape[-1] > 1 else (output.squeeze(-1) > 0).long()
        metrics["val_acc"] = (guess.reshape(-1) == y.reshape(-1)).float().mean().item()
    return metrics


def endless(x: Tensor, y: Tensor, batch: int, seed: int = 0, *, shuffle: bool = True) -> Iterator[Batch]:
    """Mini-batches of a data set, epoch after epoch."""
    generator = torch.Generator().manual_seed(9000 + seed)
    while True:
        order = torch.randperm(len(x), generator=generator) if shuffle else torch.arange(len(x))
        for start in range(0, max(len(x) - batch, 0) + 1, batch):
            chosen = order[start : start + batch]
            yield x[chosen], y[chosen]
