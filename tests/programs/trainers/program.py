"""A program that trains in someone else's trainer, and what is wrong with it. It records itself into a folder."""

from __future__ import annotations

import importlib
import pkgutil
import random
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

Main = Callable[[Path, bool], Any]
"""Called with the folder for its run, and whether the fault is repaired."""


@dataclass(frozen=True, slots=True)
class Program:
    """One training. `labels` are its root causes, `also_ok` true symptoms, neither rewarded nor punished."""

    id: str
    style: str
    """The trainer that it uses."""
    main: Main
    labels: frozenset[str]
    also_ok: frozenset[str]
    has_twin: bool
    where: str | None = None
    source: str = ""

    def run(self, folder: Path, seed: int = 0, *, fixed: bool = False) -> Path:
        """Train, and return the recorded run."""
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - trainers use the global generators
        torch.manual_seed(1000 + seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.main(folder, fixed)
        return next(path.parent for path in sorted(folder.glob("**/run.json")))


REGISTRY: Final[dict[str, Program]] = {}


def program(
    id: str,
    labels: str | Iterable[str] = (),
    *,
    also_ok: Iterable[str] = (),
    where: str | None = None,
    source: str = "",
) -> Callable[[Main], Program]:
    """Register a program under its name; the name begins with its style. No labels: a healthy one."""

    def register(main: Main) -> Program:
        assert id not in REGISTRY, f"two programs named {id}"
        roots = frozenset({labels} if isinstance(labels, str) else labels)
        style = id.removeprefix("h_").partition("_")[0]
        REGISTRY[id] = Program(id, style, main, roots, frozenset(also_ok), bool(roots), where, source)
        return REGISTRY[id]

    return register


@cache
def programs(*modules: str) -> tuple[Program, ...]:
    """Every program of this package, or those of some of its files."""
    import trainers

    names = sorted(info.name for info in pkgutil.iter_modules(trainers.__path__))
    for name in modules or names:
        importlib.import_module(f"{trainers.__name__}.{name}")
    return tuple(REGISTRY.values())
