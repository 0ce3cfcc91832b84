"""Analyses one batch through a model: where gradients flow, where they stop, and what to change.

from sonde.flow import FlowAnalyzer

FlowAnalyzer(model).analyze(x, y, loss_fn).print_summary()
"""

from __future__ import annotations

from sonde.flow.analyzers.attention import AttentionAnalyzer
from sonde.flow.analyzers.automatic import analyze
from sonde.flow.analyzers.comparative import ComparativeAnalyzer
from sonde.flow.analyzers.standard import StandardAnalyzer
from sonde.flow.analyzers.temporal import TemporalAnalyzer
from sonde.flow.coordinate.check import RefinedCoordinateCheck, refined_coordinate_check
from sonde.flow.coordinate.widths import coordinate_check
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.judge import ABSOLUTE, RELATIVE, Thresholds
from sonde.flow.monitor.attention import monitor_scaled_dot_product_attention
from sonde.flow.monitor.monitor import ModuleMonitor, MonitorMixin
from sonde.flow.scale import GradientScale, gradient_scale
from sonde.show.flow.coordinate import CoordinateReport
from sonde.show.flow.issue import Issue
from sonde.show.flow.metrics import FlowMetrics, Layer, LayerHealth
from sonde.show.flow.report import FlowReport

__all__ = [
    "ABSOLUTE",
    "RELATIVE",
    "AttentionAnalyzer",
    "ComparativeAnalyzer",
    "CoordinateReport",
    "FlowAnalyzer",
    "FlowMetrics",
    "FlowReport",
    "GradientScale",
    "Issue",
    "Layer",
    "LayerHealth",
    "ModuleMonitor",
    "MonitorMixin",
    "RefinedCoordinateCheck",
    "StandardAnalyzer",
    "TemporalAnalyzer",
    "Thresholds",
    "analyze",
    "coordinate_check",
    "gradient_scale",
    "monitor_scaled_dot_product_attention",
    "refined_coordinate_check",
]
