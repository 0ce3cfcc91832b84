"""An adapter for a trainer of your own: a callback that records what it trains.

    python examples/extend_adapter.py

A callback uses `sonde.adapters.TrainerMixin`, which starts or joins a session and ends it, and passes
`sonde.testing.AdapterTests`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import sonde
from sonde.adapters import TrainerMixin


class Trainer:
    """The trainer, as it may be in your company."""

    def __init__(self, callback: Any = None) -> None:
        self.callback = callback

    def fit(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        if self.callback:
            self.callback.on_begin(model, optimizer)
        error: BaseException | None = None
        try:
            for step, (x, y) in enumerate(batches):
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if self.callback:
                    self.callback.on_step(step, loss)
        except BaseException as caught:
            error = caught
            raise
        finally:
            if self.callback:
                self.callback.on_end(error)


class Recorder(TrainerMixin):
    """`Recorder(project="gpt", watch={"activations": False})`: the keywords of `sonde.init`, and those of `watch`."""

    def on_begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        session = self.begin_session({"optimizer": type(optimizer).__name__})
        session.watch(model, optimizer, **self.watch)

    def on_step(self, step: int, loss: Tensor) -> None:
        self.log_numbers({"loss": loss}, step)

    def on_end(self, error: BaseException | None) -> None:
        self.end_session(error)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(20)]
    Trainer(Recorder(project="extend")).fit(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    run = sonde.open("latest")
    print(f"{run.project}: {run.status} after {run.last_step + 1} steps, {len(run.scalars('loss'))} losses.")


if __name__ == "__main__":
    main()
