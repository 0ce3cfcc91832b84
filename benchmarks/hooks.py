"""Keep the arms apart: an arm's process-wide hooks are in place only while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module
from torch.optim import optimizer

TABLES: list[dict[Any, Any]] = [
    module._global_forward_pre_hooks,
    module._global_forward_hooks,
    module._global_forward_hooks_always_called,
    module._global_forward_hooks_with_kwargs,
    module._global_backward_pre_hooks,
    module._global_backward_hooks,
    optimizer._global_optimizer_pre_hooks,
    optimizer._global_optimizer_post_hooks,
]


class OwnHooks:
    """The process-wide hooks of one arm. Without this, the base would pay for the hooks of every recorder."""

    def __init__(self) -> None:
        self.held: list[dict[Any, Any]] = [{} for _ in TABLES]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        for table, mine in zip(TABLES, self.held, strict=True):
            table.update(mine)
        try:
            yield
        finally:
            self.held = [dict(table) for table in TABLES]
            for table in TABLES:
                table.clear()
