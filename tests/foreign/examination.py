"""The four questions every entry of the zoo is asked, and where the answers go.

A training is a function of `watch`, made three times from the same seeds: as it is, with an oracle, and with sonde.

    def train(watch):                       # -> imprint(model, optimizers, losses)
        model, optimizer = ...
        log = watch(model, optimizer)       # what the loop calls with {"loss": loss}
        ...
        return imprint(model, [optimizer], losses)

    examine("GPT2", "transformers", train, results=results).check()
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sonde
from comparison import Comparison, compare
from identity import differences, seed_all
from oracle import Oracle

Log = Callable[[dict[str, Any]], Any]
Watch = Callable[..., Log]
Train = Callable[[Watch], dict[str, Any]]
FOLDER_VARIABLE = "SONDE_TEST_FOREIGN_RESULTS"
"""Where `make foreign` collects the answers; none: they are asserted and forgotten."""
FAULTS = ("warning", "critical")


@dataclass
class Answers:
    """Of one entry. Lists say what is wrong; all of them are empty for a right and healthy training."""

    name: str
    group: str
    not_identical: list[str] = field(default_factory=list)
    num_identical: int = 0
    """Tensors and numbers that were compared to the bit."""
    identity_of: str = ""
    """What they are, where that is not all of the training's state."""
    values: Comparison | None = None
    warnings: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """"rule: message" of findings at warning or above."""
    known_findings: tuple[str, ...] = ()
    """Rules that are known to be wrong here; each must be among the findings, or its mark is out of date."""
    num_steps: int = 0
    num_parameters: int = 0
    seconds: float = 0.0

    def check(self) -> None:
        """Fail with all that is wrong, not with the first of it."""
        assert not self.problems, "\n".join([f"{self.group} {self.name}", *self.problems])

    @property
    def problems(self) -> list[str]:
        found = [f"not bit-identical: {name}" for name in self.not_identical[:20]]
        if self.values is not None and self.values.problems:
            found.append(str(self.values))
        known = tuple(f"[{rule}]" for rule in self.known_findings)  # a long run may report one while it trains
        found += [f"warned: {line}" for line in self.warnings if not line.endswith(known)]
        rules = [line.partition(":")[0] for line in self.findings]
        found += [f"finding: {line}" for line in self.findings if line.partition(":")[0] not in self.known_findings]
        found += [f"known finding is gone: {rule}" for rule in self.known_findings if rule not in rules]
        return found

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.values is not None:
            fields["values"] = {
                "problems": len(self.values.problems),
                "not_compared": self.values.not_compared,
                "num_series": self.values.num_series,
                "num_values": self.values.num_values,
            }
        return fields | {"problems": self.problems}


names_recorded: list[str] = []
"""Of the test that is running."""


def results_folder() -> Path | None:
    """Where a table is being made."""
    return Path(os.environ[FOLDER_VARIABLE]) if FOLDER_VARIABLE in os.environ else None


def record(answers: Answers) -> None:
    """Keep them for the table, where a table is being made."""
    names_recorded.append(answers.name)
    folder = results_folder()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{answers.group}-{answers.name}.json".replace("/", "-").replace(" ", "-")
        file.write_text(json.dumps(answers.as_json(), indent=1), encoding="utf-8")


def examine(
    name: str,
    group: str,
    train: Train,
    *,
    known_findings: Iterable[str] = (),
    seed: int = 0,
    steps: Container[int] | None = None,
) -> Answers:
    """Train three times in the current folder, with the default `sonde.watch(model, optimizer)`, and compare the values
    of these steps, or of all."""
    began = time.perf_counter()
    answers = Answers(name, group, known_findings=tuple(known_findings))
    with python_warnings() as usual:
        plain = _seeded(train, _nothing, seed)
        witness: list[Oracle] = []
        with_oracle = _seeded(train, _oracle_watch(witness, steps), seed)
        witness[0].detach()
    assert not differences(plain, with_oracle), f"{name} is not repeatable: {differences(plain, with_oracle)[:5]}"
    with python_warnings() as now, sonde_words() as words:
        watched = _seeded(train, lambda *given: sonde.watch(*given).log, seed)
        sonde.finish()
    run = sonde.open("latest")
    answers.not_identical, answers.num_identical = differences(plain, watched), len(plain)
    answers.values = compare(run, witness[0])
    answers.warnings = [*words, *run.warnings, *sorted(now - usual)]
    answers.findings = faults_of(run)
    answers.num_steps = witness[0].step + 1
    answers.num_parameters = sum(p.numel() for p in witness[0].model.parameters())
    answers.seconds = time.perf_counter() - began
    record(answers)
    return answers


def faults_of(run: Any) -> list[str]:
    """Findings at warning or above, with what they say."""
    return [f"{f.rule}: {f.message} (step {f.step}, {f.sites[:3]})" for f in run.findings() if f.severity in FAULTS]


@contextlib.contextmanager
def sonde_words() -> Iterator[list[str]]:
    """The lines sonde writes to stderr inside, but for the one it begins with and the one it ends with."""
    found: list[str] = []
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield found
    finally:
        lines = [line for line in text.getvalue().splitlines() if line.startswith("sonde:")]
        found += [line for line in lines if not _is_frame(line)]


@contextlib.contextmanager
def python_warnings() -> Iterator[set[str]]:
    """What Python's warnings say inside, whoever gives them: those that only a watched training gives are sonde's."""
    found: set[str] = set()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found |= {f"{item.category.__name__}: {item.message}" for item in seen}


def _is_frame(line: str) -> bool:
    said = line.removeprefix("sonde: ").lower()
    return said.startswith(("recording to", "finished"))


def _seeded(train: Train, watch: Watch, seed: int) -> dict[str, Any]:
    seed_all(seed)
    return train(watch)


def _nothing(*given: Any) -> Log:
    return lambda values: None


def _oracle_watch(witness: list[Oracle], steps: Container[int] | None) -> Watch:
    def watch(model: Any, *optimizers: Any) -> Log:
        witness.append(Oracle(model, *optimizers, steps=steps))
        return witness[-1].log

    return watch
