"""Detects whether torch.compile may be active for a model. Checks only what is already loaded; never imports the
compiler."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether some module of the model runs compiled."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def num_compiled_frames() -> int:
    """The number of Python functions that this process has compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    # `get`, because indexing a defaultdict would create an entry.
    return int(utils.counters.get("frames", {}).get("total", 0)) if utils is not None else 0


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled modules and functions as the Python code that they were compiled from: hooks see nothing inside
    compiled code. Without the compiler loaded, nothing can be compiled."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
