"""One batch through a model, analysed: where gradients flow, where they stop, and what to change.

from sonde.flow import FlowAnalyzer

FlowAnalyzer(model).analyze(x, y, loss_fn).print_summary()
"""

from __future__ import annotations

from sonde.flow.attention import AttentionAnalyzer
from sonde.flow.attention_monitor import monitor_scaled_dot_product_attention
from sonde.flow.automatic import analyze
from sonde.flow.comparative import ComparativeAnalyzer
from sonde.flow.coordinate import RefinedCoordinateCheck, refined_coordinate_check
from sonde.flow.coordinate_widths import CoordinateReport, coordinate_check
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.issue import Issue
from sonde.flow.judge import ABSOLUTE, RELATIVE, Thresholds
from sonde.flow.metrics import FlowMetrics, Layer, LayerHealth
from sonde.flow.monitor import ModuleMonitor, MonitorMixin
from sonde.flow.report import FlowReport
from sonde.flow.scale import GradientScale, gradient_scale
from sonde.flow.standard import StandardAnalyzer
from sonde.flow.temporal import TemporalAnalyzer

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
