"""`sonde.flow.analyze`: look at the model, and let every analyzer that fits it have its say, in one pass each."""

from __future__ import annotations

from typing import Any

from torch import nn

from sonde.flow.attention import AttentionAnalyzer, find_attention
from sonde.flow.batch import LossFunction
from sonde.flow.issue import Issue
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
    report = StandardAnalyzer(thresholds=thresholds).analyze(model, x, y, loss_fn, steps)
    if find_attention(model, ModelNames(model)):
        report = joined(report, AttentionAnalyzer(thresholds=thresholds).analyze(model, x, y, loss_fn, steps))
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()):
        report = joined(report, TemporalAnalyzer(thresholds=thresholds).analyze(model, x, y, loss_fn, steps))
    return report


def joined(a: FlowReport, b: FlowReport) -> FlowReport:
    """Both reports' issues and details; each issue once."""
    from dataclasses import replace

    from sonde.flow.judge import judged

    thresholds = RELATIVE if a.is_relative else _absolute()
    own: list[Issue] = list(dict.fromkeys([*a.issues, *b.issues]))
    single = {"VANISHING", "EXPLODING", "DEAD", "NUMERICAL"}  # what judging a layer finds by itself
    extra = [issue for issue in own if issue.type not in single]
    layers = tuple(judged(a.layers, thresholds, extra))
    names = {layer.name for layer in layers}
    whole = tuple(issue for issue in extra if issue.layer not in names)
    return replace(a, layers=layers, model_issues=whole, details={**a.details, **b.details})


def _absolute() -> Thresholds:
    from sonde.flow.judge import ABSOLUTE

    return ABSOLUTE
