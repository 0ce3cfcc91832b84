"""The keywords of `wandb.watch`, for users who switch: `log`, `log_freq`, `criterion`, `idx`, `log_graph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.errors import UsageError
from sonde.probe.schedule import every

_LOGS: Final[dict[str | None, dict[str, bool]]] = {
    "all": {},
    "gradients": {"params": False, "updates": False, "optim": False},
    "parameters": {"grads": False, "updates": False, "optim": False},
    None: {"params": False, "grads": False, "updates": False, "optim": False},
}
NOT_GIVEN: Final = "not given"


def translate(given: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent keywords of `sonde.watch`. `criterion`, `idx` and `log_graph` have no effect."""
    return translated(log=given.get("log", NOT_GIVEN), log_freq=given.get("log_freq"))


def translated(log: Any = NOT_GIVEN, log_freq: Any = None) -> dict[str, Any]:
    """The equivalent keywords of `sonde.watch`."""
    if log != NOT_GIVEN and log not in _LOGS:
        raise UsageError(f'log= must be "gradients", "parameters", "all" or None, as in wandb.watch; got {log!r}.')
    if log_freq is not None and (not isinstance(log_freq, int) or log_freq < 1):
        raise UsageError(f"log_freq= must be a number of steps, at least 1; got {log_freq!r}.")
    found: dict[str, Any] = {} if log == NOT_GIVEN else dict(_LOGS[log])
    return found if log_freq is None else {**found, "when": every(log_freq)}
