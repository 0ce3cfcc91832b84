"""A model of the zoo: how it is built, what it learns, and the plain loop that trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examination import Answers, Watch, examine
from identity import imprint
from tasks import Batch, Batches

NUM_STEPS = 40
WARM_UP = 5
COMPARED = frozenset({*range(6), 10, 20, 30, NUM_STEPS - 1})
"""Steps whose values are compared: the first, those with histograms, the last."""


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of models that are given their labels."""
    return model(**batch).loss


@dataclass(frozen=True)
class Specimen:
    """Trained with AdamW, a short warm-up and clipping, as most such models are."""

    name: str
    group: str
    build: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    loss: Callable[[nn.Module, Batch], Tensor] = own_loss
    lr: float = 3e-3
    clip: float = 1.0
    is_quick: bool = False
    """One of those that every change is checked with."""
    known_findings: tuple[str, ...] = ()
    """Rules that are wrong about this healthy training. Listed in the table; each has to be there."""

    def train(self, watch: Watch) -> dict[str, Any]:
        model = self.build()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=self.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
        log = watch(model, optimizer)
        losses = []
        for batch in islice(self.batches(), NUM_STEPS):
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            scheduler.step()
            log({"loss": loss})
            losses.append(loss.item())
        return imprint(model, [optimizer], losses)

    def examine(self) -> Answers:
        return examine(self.name, self.group, self.train, known_findings=self.known_findings, steps=COMPARED)


def parameters(specimens: Iterable[Specimen]) -> list[Any]:
    """Of a test: each by its name, and those that every change is checked with marked so."""
    return [
        pytest.param(specimen, id=specimen.name, marks=[pytest.mark.slow] if specimen.is_quick else [])
        for specimen in specimens
    ]
