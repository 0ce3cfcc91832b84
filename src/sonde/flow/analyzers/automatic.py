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
) -> FlowReport:
    """One report with everything the analyzers find in this model on this batch.

    sonde.flow.analyze(model, x, y, nn.CrossEntropyLoss()).print_summary()
    """
    analyzer = FlowAnalyzer(model, thresholds=thresholds)
    anatomy = ModelIndex(model)
    return analyzer.analyze_with(fitting(anatomy), x, y, loss_fn, steps, anatomy=anatomy)


def fitting(anatomy: ModelIndex) -> list[Analyzer]:
    """The analyzers whose type of layer the model has."""
    found: list[Analyzer] = [StandardAnalyzer()]
    if anatomy.attention:
        found.append(AttentionAnalyzer())
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in anatomy.modules):
        found.append(TemporalAnalyzer())
    return found
