"""`sonde.flow.analyze`: runs every analyzer that fits the model, all in one pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from sonde.flow.analyzers.attention import AttentionAnalyzer
from sonde.flow.analyzers.standard import StandardAnalyzer
from sonde.flow.analyzers.temporal import TemporalAnalyzer
from sonde.flow.batch import LossFunction
from sonde.flow.engine import Analyzer, FlowAnalyzer
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.model_index import ModelIndex
from sonde.show.flow.report import FlowReport


def analyze(
    model: nn.Module,
    x: Any,
    y: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    steps: int = 1,
    thresholds: Thresholds = RELATIVE,
    full_entropy: bool = False,
) -> FlowReport:
    """One report with everything the analyzers find in this model on this batch. `full_entropy`: compute the entropy of
    attention heads from every query, instead of from a sample.

    sonde.flow.analyze(model, x, y, nn.CrossEntropyLoss()).print_summary()
    """
    analyzer = FlowAnalyzer(model, thresholds=thresholds)
    anatomy = ModelIndex(model)
    return analyzer.analyze_with(fitting(anatomy, full_entropy=full_entropy), x, y, loss_fn, steps, anatomy=anatomy)


def fitting(anatomy: ModelIndex, *, full_entropy: bool = False) -> list[Analyzer]:
    """The analyzers whose type of layer the model has."""
    found: list[Analyzer] = [StandardAnalyzer()]
    if anatomy.attention:
        found.append(AttentionAnalyzer(full_entropy=full_entropy))
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in anatomy.modules):
        found.append(TemporalAnalyzer())
    return found
