"""One batch through a model, analysed: where gradients flow, where they stop, and what to change.

from sonde.flow import FlowAnalyzer

FlowAnalyzer(model).analyze(x, y, loss_fn).print_summary()
"""

from __future__ import annotations

from sonde.flow.coordinate import CoordinateReport, RefinedCoordinateCheck, coordinate_check, refined_coordinate_check
from sonde.flow.engine import FlowAnalyzer
from sonde.flow.issue import Issue
from sonde.flow.metrics import FlowMetrics, Layer, LayerHealth
from sonde.flow.monitor import ModuleMonitor, MonitorMixin
from sonde.flow.report import FlowReport
from sonde.flow.scale import GradientScale, gradient_scale

__all__ = [
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
    "coordinate_check",
    "gradient_scale",
    "refined_coordinate_check",
]
