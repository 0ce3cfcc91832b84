"""`sonde.flow.analyze`: look at the model, and let every analyzer that fits it have its say, all in one pass."""

from __future__ import annotations

from typing import Any

from torch import nn

from sonde.flow.attention import AttentionAnalyzer
from sonde.flow.attention_find import find_attention
from sonde.flow.batch import LossFunction
from sonde.flow.engine import Analyzer, FlowAnalyzer
from sonde.flow.judge import RELATIVE, Thresholds
from sonde.flow.report import FlowReport
from sonde.flow.standard import StandardAnalyzer
from sonde.flow.temporal import TemporalAnalyzer
from sonde.probe.model import ModelNames


def analyze(
    model: nn.Module,
    x: Any,
    y: Any = None,
    loss_fn: LossFunction | None = None,
    *,
    steps: int = 1,
    thresholds: Thresholds = RELATIVE,
) -> FlowReport:
    """One report of all that can be said about this model on this batch.

    sonde.flow.analyze(model, x, y, nn.CrossEntropyLoss()).print_summary()
    """
    analyzer = FlowAnalyzer(model, thresholds=thresholds)
    return analyzer.analyze_with(fitting(model), x, y, loss_fn, steps)


def fitting(model: nn.Module) -> list[Analyzer]:
    """The analyzers whose kind of layer the model has."""
    found: list[Analyzer] = [StandardAnalyzer()]
    if find_attention(model, ModelNames(model)):
        found.append(AttentionAnalyzer())
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()):
        found.append(TemporalAnalyzer())
    return found
