"""What an analysis knows of a model before anything runs, each thing looked for once: a GPU waits for all of it."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from sonde.flow.analyzers.attention_find import Attention, find_attention
from sonde.probe.model import ModelNames


class ModelIndex:
    """The names in a model, its modules, and where its attention is. Holds the model: not to be kept."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = ModelNames(model)

    @cached_property
    def modules(self) -> list[nn.Module]:
        return list(self.model.modules())

    @cached_property
    def attention(self) -> list[Attention]:
        return find_attention(self.modules, self.names)
