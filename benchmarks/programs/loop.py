"""The training loop of the generated programs, with the calls to sonde that a user would write, and its outcome."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from programs.setup import Job, Setup, build

MAX_BAD: Final = 15
"""Number of steps with a non-finite loss after which a user would have stopped."""
CHECKPOINTS: Final = 5


@dataclass(frozen=True)
class Outcome:
    """How well a program learned, by its task's score on held-out data. Not visible to any rule."""

    scores: tuple[float, ...]
    """At equally spaced steps: 0 is chance, 1 is perfect. Negative or -1 for a model that is NaN."""
    final_loss: float
    steps: int
    kept_mib: float
    """Memory that the loop kept alive at the end, beyond the start."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """The calls to sonde of one style."""

    def __init__(self, setup: Setup, job: Job, folder: Path) -> None:
        import sonde

        self._sonde, self._style = sonde, setup.style
        self.session = sonde.init(project="programs", name="run", dir=str(folder), verbose=False, live_rules=False)
        self.session.watch(job.model, job.optimizer)
        self._epoch: list[float] = []
        self._per_epoch = max(2, len(setup.data.x) // setup.batch)

    def batch(self, x: Any, y: Any) -> None:
        if self._style.batch:
            self._sonde.batch(x, y)

    def step(self, index: int, loss: float) -> None:
        self._epoch.append(loss)
        if self._style.logs == "step":
            self._sonde.log({self._style.loss: loss})
        elif self._style.logs == "epoch" and (index + 1) % self._per_epoch == 0:
            self._sonde.log({self._style.loss: sum(self._epoch) / len(self._epoch)})
            self._epoch.clear()

    def validation(self, loss: float) -> None:
        self._sonde.log({self._style.validates: loss})

    def finish(self) -> Path:
        self._sonde.finish()
        return Path(self.session.path)


def train(setup: Setup, folder: Path) -> tuple[Path, Outcome]:
    """Train one program under sonde; returns the folder of the run, and how it went."""
    job = build(setup)
    recorder = Recorder(setup, job, folder)
    kept: list[Any] = []
    states = [_state(job)]
    every = max(1, setup.steps // CHECKPOINTS)
    num_bad, loss, index = 0, math.nan, 0
    for index, (x, y) in zip(range(setup.steps), job.batches, strict=False):
        loss = _step(job, recorder, index, x, y, kept)
        recorder.step(index, loss)
        if setup.style.validates and (index + 1) % max(10, setup.steps // 10) == 0:
            recorder.validation(_validate(job))
        if (index + 1) % every == 0:
            states.append(_state(job))
        num_bad = 0 if math.isfinite(loss) else num_bad + 1
        if num_bad >= MAX_BAD:
            break
    path = recorder.finish()
    if num_bad:
        states.append(_state(job))
    scores = tuple(_scores(job, states[1:]))
    return path, Outcome(scores, loss, index + 1, _size(kept))


def _step(job: Job, recorder: Recorder, index: int, x: Any, y: Any, kept: list[Any]) -> float:
    setup, model, optimizer = job.setup, job.model, job.optimizer
    model.train(not setup.eval_mode)
    recorder.batch(x, y)
    if setup.zero_grad and index % setup.accumulate == 0:
        optimizer.zero_grad()
    output = model(x)
    loss_fn = setup.loss.forward if setup.style.functional and isinstance(setup.loss, torch.nn.Module) else setup.loss
    loss = loss_fn(output, y)
    if loss.requires_grad:
        (loss / setup.accumulate).backward(retain_graph=setup.keep)
    if setup.keep:
        kept.append((output, loss, x.clone()))
    if setup.after_backward is not None:
        setup.after_backward(model)
    if (index + 1) % setup.accumulate == 0:
        if setup.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setup.clip)
        optimizer.step()
        if job.scheduler is not None:
            job.scheduler.step()
    return loss.item()


def _validate(job: Job) -> float:
    job.model.eval()
    with torch.no_grad():
        loss = job.setup.loss(job.model(job.setup.data.x_val), job.setup.data.y_val).item()
    job.model.train()
    return loss


def _state(job: Job) -> dict[str, Any]:
    return copy.deepcopy(job.model.state_dict())


def _scores(job: Job, states: list[dict[str, Any]]) -> Iterator[float]:
    """The score at each state, after the run has ended and is no longer recorded."""
    for state in states:
        job.model.load_state_dict(state)
        job.model.eval()
        with torch.no_grad():
            try:
                score = job.setup.task.score(job.model(job.setup.data.x_val), job.setup.data.y_val)
            except (RuntimeError, ValueError):  # an output of another shape than the task's: a fault of the program
                score = math.nan
        yield max(-1.0, score) if math.isfinite(score) else -1.0


def _size(kept: list[Any]) -> float:
    return (
        sum(part.element_size() * part.nelement() for parts in kept for part in parts if torch.is_tensor(part)) / 2**20
    )
