"""Runs a snippet of a seed document with only its imports changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch


def run(code: str, package: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The names that the snippet leaves. `given` are those it takes for granted."""
    alone = re.sub(rf"^from {package} import", f"from sonde.compat.{package} import", code, flags=re.MULTILINE)
    alone = re.sub(rf"^import {package}$", f"from sonde.compat import {package}", alone, flags=re.MULTILINE)
    assert alone != code
    names: dict[str, Any] = {"nn": torch.nn, "F": torch.nn.functional, "torch": torch, **given}
    exec(compile(alone, package, "exec"), names)
    return names


@pytest.fixture
def run_snippet() -> Callable[..., dict[str, Any]]:
    return run
