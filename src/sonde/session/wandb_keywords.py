"""The words of `wandb.watch`, for those who come from there: `log`, `log_freq`, `criterion`, `idx`, `log_graph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sonde.errors import UnknownNameError, UsageError
from sonde.probe.schedule import every

_LOGS: Final[dict[str | None, dict[str, bool]]] = {
    "all": {},
    "gradients": {"params": False, "updates": False, "optim": False},
    "parameters": {"grads": False, "updates": False, "optim": False},
    None: {"params": False, "grads": False, "updates": False, "optim": False},
}
_WITHOUT_USE: Final = ("criterion", "idx", "log_graph")
"""Taken, so that a call may stay as it is; there is nothing here that they would change."""
OUR_WORDS: Final = (
    "params", "grads", "updates", "optim", "activations", "activation_grads", "inspect", "sites", "when", "budget",
    "snapshots", "mirror", "prefix",
)  # fmt: skip
NOT_GIVEN: Final = "not given"


def translate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `wandb.watch` in those of `sonde.watch`; a keyword of neither is refused."""
    unknown = sorted(given.keys() - {"log", "log_freq", *_WITHOUT_USE})
    if unknown:
        raise UnknownNameError("keyword of watch()", unknown[0], (*OUR_WORDS, "log", "log_freq"))
    return translated(**{name: value for name, value in given.items() if name not in _WITHOUT_USE})


def translated(log: Any = NOT_GIVEN, log_freq: Any = None) -> dict[str, Any]:
    """What they mean in the words of `sonde.watch`."""
    if log != NOT_GIVEN and log not in _LOGS:
        raise UsageError(f'log= is "gradients", "parameters", "all" or None, as in wandb.watch; got {log!r}.')
    if log_freq is not None and (not isinstance(log_freq, int) or log_freq < 1):
        raise UsageError(f"log_freq= is a number of steps, at least 1; got {log_freq!r}.")
    found: dict[str, Any] = {} if log == NOT_GIVEN else dict(_LOGS[log])
    return found if log_freq is None else {**found, "when": every(log_freq)}
