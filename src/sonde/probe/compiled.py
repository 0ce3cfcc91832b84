"""Whether torch.compile may be at work on a model. Asks only what is already loaded; never imports the compiler."""

from __future__ import annotations

import sys

from torch import nn


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether some module of the model runs compiled."""
    return any(
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def num_compiled_frames() -> int:
    """How many Python functions this process has compiled so far."""
    utils = sys.modules.get("torch._dynamo.utils")
    # `get`, because asking a defaultdict by key would leave one there.
    return int(utils.counters.get("frames", {}).get("total", 0)) if utils is not None else 0
