"""Our own failures: reported once each, counted, and after too many of them sonde switches itself off."""

from __future__ import annotations

from collections.abc import Callable


class Breaker:
    """Keeps no exception, since a traceback would keep the user's tensors alive."""

    def __init__(self, max_errors: int, warn: Callable[[str], None], on_open: Callable[[str], None]) -> None:
        self.max_errors, self.warn, self.on_open = max_errors, warn, on_open
        self.num_errors = 0
        self.is_open = False
        self._told: set[str] = set()

    def __call__(self, where: str, error: Exception) -> None:
        """Note a failure in a hook. Training goes on."""
        self.num_errors += 1
        what = f"{where}: {type(error).__name__}: {error}"[:500]
        key = f"{where}: {type(error).__name__}"
        if key not in self._told:
            self._told.add(key)
            self.warn(f"a measurement failed and was left out ({what}). Training is not affected.")
        if self.num_errors >= self.max_errors and not self.is_open:
            self.is_open = True
            self.on_open(what)
