"""One training program, run from the same seed with the oracle and with sonde. A program tells the oracle the step of
every number it logs, but not sonde.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import sonde
from comparison import always, compare
from examination import Answers, faults_of, python_warnings, record, sonde_words
from identity import differences, imprint, leaves, seed_all
from witnesses import Witnesses


class Trial:
    """What a program calls. This one does nothing but remember; those below record."""

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: list[Optimizer] = []
        self.losses: list[float] = []
        self.kept: dict[str, Any] = {}

    def watch(
        self, model: Any, optimizer: Any = None, *, follows: Any = None, prefix: str = "", **options: Any
    ) -> None:
        """As `sonde.watch`. Where no optimizer is named, `follows` says which ones step this model.

        `compiled` is the part whose modules are not called by themselves; `is_reentrant`: it uses that kind of
        checkpointing.
        """
        self.models[prefix] = model
        self.follow(*_listed(optimizer), *_listed(follows))

    def follow(self, *optimizers: Optimizer) -> None:
        """These step the model from now on. sonde does not know that."""
        self.optimizers += optimizers

    def leave(self, optimizer: Optimizer) -> None:
        """The program lets go of it."""
        self.optimizers = [known for known in self.optimizers if known is not optimizer]

    def log(self, values: Mapping[str, Any], *, at: int, step: int | None = None) -> None:
        """`sonde.log(values, step)`; it must be found at `at`."""
        self.losses += [value.item() if isinstance(value, torch.Tensor) else float(value) for value in values.values()]

    def keep(self, **values: Any) -> None:
        """More that must not differ by a bit at the end."""
        self.kept |= values

    def rewind(self, step: int) -> None:
        """An older checkpoint was loaded; this step is made next."""

    def step(self) -> None:
        """`sonde.step()`: gradients are there, and the program itself will use them."""

    def skipped(self, optimizer: Optimizer) -> None:
        """A scaler skipped the step of this optimizer. sonde does not know that."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forward passes in here train nothing, and are part of no step: no gradient comes back through them."""
        yield

    def saw(self, site: str, output: torch.Tensor) -> None:
        """This is what a compiled module returned; no hook is put on it."""

    def trained(self, model: nn.Module, optimizers: Iterable[Optimizer], losses: Iterable[float]) -> None:
        """What a trainer has made, where the program itself had none of it in its hands."""
        self.models[""], self.optimizers, self.losses = model, list(optimizers), list(losses)

    def imprint(self) -> dict[str, Any]:
        """Everything that must be bit-identical."""
        found: dict[str, Any] = {}
        for prefix, model in self.models.items():
            found |= {f"{prefix}{name}": value for name, value in imprint(model, [], []).items()}
        found |= imprint(nn.Module(), self.optimizers, self.losses)
        return found | {f"kept{path}": value for path, value in leaves(self.kept)}


class Witnessed(Trial):
    """With the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.oracle = Witnesses()

    def watch(
        self, model: Any, optimizer: Any = None, *, follows: Any = None, prefix: str = "", **options: Any
    ) -> None:
        self.oracle.is_reentrant = options.get("is_reentrant", False)
        self.oracle.watch(model, prefix=prefix, compiled=options.get("compiled"))
        super().watch(model, optimizer, follows=follows, prefix=prefix)

    def follow(self, *optimizers: Optimizer) -> None:
        for optimizer in optimizers:
            self.oracle.follow(optimizer)
        super().follow(*optimizers)

    def leave(self, optimizer: Optimizer) -> None:
        self.oracle.leave(optimizer)
        super().leave(optimizer)

    def log(self, values: Mapping[str, Any], *, at: int, step: int | None = None) -> None:
        self.oracle.log(values, at)
        super().log(values, at=at, step=step)

    def rewind(self, step: int) -> None:
        self.oracle.rewind(step)

    def step(self) -> None:
        self.oracle.sweep()

    def skipped(self, optimizer: Optimizer) -> None:
        self.oracle.skip(optimizer)

    @contextmanager
    def aside(self) -> Iterator[None]:
        with self.oracle.paused():
            yield

    def saw(self, site: str, output: torch.Tensor) -> None:
        self.oracle.saw(site, output)


class Recorded(Trial):
    """With sonde, as a user would write it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.session = sonde.init(dir=folder, project="loops")

    def watch(
        self, model: Any, optimizer: Any = None, *, follows: Any = None, prefix: str = "", **options: Any
    ) -> None:
        sonde.watch(model, optimizer, prefix=prefix)
        super().watch(model, optimizer, follows=follows, prefix=prefix)

    def log(self, values: Mapping[str, Any], *, at: int, step: int | None = None) -> None:
        sonde.log(values, step)
        super().log(values, at=at, step=step)

    def rewind(self, step: int) -> None:
        self.session.rewind(step)

    def step(self) -> None:
        sonde.step()


class Hosted(Trial):
    """With sonde in a trainer, whose callback begins and ends the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.options = {"dir": folder, "project": "trainers"}


@dataclass(frozen=True)
class Program:
    """A training that people write, and what is known to be special about it."""

    name: str
    train: Callable[[Trial], None]
    module: str
    group: str = "loop"
    is_quick: bool = False
    """One of those that every change is checked with."""
    known_findings: tuple[str, ...] = ()
    """Rules that are wrong about this healthy training. Listed in the table; each has to be there."""
    promised: Callable[[str, int], bool] = always
    has_attempts: bool = True
    """Whether what was made before a rewind is in the same run."""

    def __str__(self) -> str:
        return self.name

    def examine(self, folder: Path) -> Answers:
        """Train with the oracle and with sonde, and compare."""
        began = time.perf_counter()
        with python_warnings() as usual:
            witnessed = Witnessed()
            plain = self._train(witnessed, folder / "without")
            witnessed.oracle.detach()
        with python_warnings() as now, sonde_words() as words:
            watched = self._train(Recorded(folder) if self.group == "loop" else Hosted(folder), folder / "with")
            sonde.finish()
        assert witnessed.models, f"{self.name} says of no model that it was trained"
        run, oracle = sonde.open("latest", dir=folder), witnessed.oracle
        answers = Answers(self.name, self.group, known_findings=self.known_findings)
        answers.not_identical, answers.num_identical = differences(plain, watched), len(plain)
        answers.values = compare(run, oracle, promised=self.promised)
        answers.findings = faults_of(run)
        answers.warnings = [*words, *run.warnings, *sorted(now - usual)]
        answers.values.different += _ending(run, oracle.last_step)
        for number, history in enumerate(oracle.histories if self.has_attempts else ()):
            earlier = compare(run.attempt(number), history, promised=self.promised)
            answers.values.different += [f"attempt {number}: {problem}" for problem in earlier.problems]
            answers.values.num_values += earlier.num_values
        answers.num_steps = oracle.last_step + 1
        answers.num_parameters = sum(p.numel() for model in witnessed.models.values() for p in model.parameters())
        answers.seconds = time.perf_counter() - began
        record(answers)
        return answers

    def _train(self, trial: Trial, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        with contextlib.chdir(folder):  # where checkpoints are written
            seed_all(0)
            self.train(trial)
            return trial.imprint()


def _ending(run: Any, last_step: int) -> list[str]:
    found = [str(problem) for problem in run.verify()]
    if run.status != "finished":
        found.append(f"status {run.status}")
    if run.last_step != last_step:
        found.append(f"last step {run.last_step}, is {last_step}")
    return found


class Programs(list[Program]):
    """`@loop("name")` adds a program; `loop.of(__name__)` are those of a file, as parameters of a test."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def __call__(self, name: str, **options: Any) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
        def add(train: Callable[[Trial], None]) -> Callable[[Trial], None]:
            self.append(Program(name, train, train.__module__, self.group, **options))
            return train

        return add

    def of(self, module: str) -> list[Any]:
        """Those that are quick are checked with every change: they are `slow`, the others `foreign`."""
        return [
            pytest.param(program, id=program.name, marks=[pytest.mark.slow] if program.is_quick else [])
            for program in self
            if program.module == module
        ]


loop = Programs("loop")
trainer = Programs("trainer")


def _listed(optimizers: Any) -> Iterable[Optimizer]:
    if optimizers is None:
        return []
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
