"""The names of five earlier tools, for programs written for them: change the import, and the program runs on sonde.

    from sonde.compat import tracer                          # LayerClaw
    from sonde.compat.paramlake import paramlake             # ParamLake
    from sonde.compat.training_lens import TrainingWrapper   # Training Lens
    from sonde.compat.gradient_flow import FlowAnalyzer      # Gradient Flow Toolkit
    from sonde.compat.pytorch_module_monitor import ModuleMonitor

Each module translates names and arguments, and forwards to sonde's own parts. It holds no logic; docs/compat.md lists
what each name becomes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["gradient_flow", "paramlake", "pytorch_module_monitor", "tracer", "training_lens"]


def __getattr__(name: str) -> Any:
    """Each module is loaded on first use: they need different packages."""
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return list(__all__)
