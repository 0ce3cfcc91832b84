"""The generated programs, by id. Hashes of names decide which combinations exist; nothing was picked by result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from programs.fault import Fault, all_faults
from programs.models import ARCHITECTURES, Architecture
from programs.setup import ADAPTIVE, FOR_TRANSFORMERS, PLAIN, SCHEDULES, STYLES, Setup, compose
from programs.split import choose, is_held_out
from programs.tasks import TASKS

NUM_HEALTHY = 130


@dataclass(frozen=True)
class Program:
    """One combination. `setup(fixed)` makes it, with the fault or without."""

    id: str
    architecture: str
    task: str
    optimizer: str
    schedule: str
    style: str
    seed: int
    fault: Fault | None = None
    level: int = 0

    @property
    def labels(self) -> frozenset[str]:
        """Acceptable root causes; none for a healthy program."""
        return self.fault.labels if self.fault else frozenset()

    @property
    def also_ok(self) -> frozenset[str]:
        return self.fault.also if self.fault else frozenset()

    @property
    def has_twin(self) -> bool:
        return self.fault is not None

    @property
    def base(self) -> str:
        """The name of the healthy program that the fault was planted in."""
        own = f"-{self.fault.name}-{self.level}" if self.fault and self.fault.twin else ""
        return f"base-{self.architecture}-{self.task}-{self.optimizer}-{self.style}{own}"

    @property
    def held_out(self) -> bool:
        return is_held_out(self.architecture, self.task)

    def setup(self, *, fixed: bool = False) -> Setup:
        made = compose(self.architecture, self.task, self.optimizer, self.schedule, self.style, self.seed)
        if self.fault and self.fault.twin:
            self.fault.twin(made, self.level)
        if self.fault and not fixed:
            self.fault.plant(made, self.level)
        return made


@cache
def programs() -> tuple[Program, ...]:
    """All programs, faulty and healthy, in a mixed but fixed order: any prefix is a fair sample."""
    made = [*_faulty(), *_healthy()]
    assert len({p.id for p in made}) == len(made)
    return tuple(sorted(made, key=lambda p: choose(f"order/{p.id}", 1 << 60)))


def by_id(id: str) -> Program:
    return next(program for program in programs() if program.id == id)


def _faulty() -> Iterator[Program]:
    for fault in all_faults().values():
        pairs = [(a, t) for a, t in _pairs() if fault.where(ARCHITECTURES[a], TASKS[t])]
        assert pairs, fault.name
        pairs.sort(key=lambda pair: choose(f"{fault.name}/{pair}", 1 << 60))
        for k in range(fault.num):
            yield _program(fault.name, k, *pairs[k % len(pairs)], fault)


def _healthy() -> Iterator[Program]:
    pairs = sorted(_pairs(), key=lambda pair: choose(f"healthy/{pair}", 1 << 60))
    for k in range(NUM_HEALTHY):
        yield _program("healthy", k, *pairs[k % len(pairs)])


def _pairs() -> list[tuple[str, str]]:
    return [(a.name, task) for a in ARCHITECTURES.values() for task in a.tasks]


def _program(name: str, k: int, architecture: str, task: str, fault: Fault | None = None) -> Program:
    """The combination k of a fault (or of none). Of each pair there are few healthy bases: faults share their twins."""
    usual = _usual(ARCHITECTURES[architecture], f"{architecture}/{task}")
    wanted = fault.optimizers if fault else ()
    optimizers = tuple(o for o in usual if not wanted or o in wanted) or wanted
    optimizer = optimizers[choose(f"{name}/{k}/optimizer", len(optimizers))]
    key = f"{architecture}/{task}/{optimizer}" + ("" if fault else f"/{k}")
    schedules = ["constant", "constant", *SCHEDULES]
    schedule = schedules[choose(f"{key}/schedule", len(schedules))]
    if architecture == "post_norm" and not schedule.startswith("warmup"):
        schedule = "warmup"  # without one it does not train: that is a fault
    style = (fault.style if fault else "") or list(STYLES)[choose(f"{key}/style", len(STYLES))]
    return Program(
        f"{name}-{k}-{architecture}-{task}-{optimizer}", architecture, task, optimizer, schedule, style,
        choose(f"{key}/seed", 1000), fault, (k + choose(name, 3)) % 3,
    )  # fmt: skip


def _usual(architecture: Architecture, key: str) -> tuple[str, ...]:
    """Three optimizers for a pair: a plain one where it learns with one, an Adam, and any other."""
    others = FOR_TRANSFORMERS if architecture.adaptive else ADAPTIVE
    groups = (others if architecture.adaptive else PLAIN, ("adam", "adamw"), others)
    return tuple(dict.fromkeys(group[choose(f"{key}/{i}", len(group))] for i, group in enumerate(groups)))
