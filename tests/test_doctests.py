"""Every example in a docstring runs: in the package, and in the programs that tests share."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

SOURCES = (Path(__file__).parents[1] / "src", Path(__file__).parent / "programs")
WITH_EXAMPLES = [
    path.relative_to(source)
    for source in SOURCES
    for path in sorted(source.rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


def test_there_are_examples() -> None:
    assert len(WITH_EXAMPLES) > 5


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=str)
def test_examples_of(path: Path) -> None:
    parts = path.with_suffix("").parts
    module = importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    names = {"np": np, "torch": torch}
    failed, tried = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert tried > 0
    assert failed == 0
