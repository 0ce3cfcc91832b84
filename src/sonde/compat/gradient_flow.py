"""The names of the Gradient Flow Toolkit: import them from `sonde.compat.gradient_flow` instead of `gradient_flow`.

Analyzers and reports are those of `sonde.flow`. Hooks and reporters, which `sonde.flow` does not need, are thin classes
on its parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from sonde.compat.hooks import HookList
from sonde.errors import UsageError
from sonde.flow import (
    AttentionAnalyzer,
    ComparativeAnalyzer,
    FlowAnalyzer,
    FlowMetrics,
    FlowReport,
    GradientScale,
    LayerHealth,
    StandardAnalyzer,
    TemporalAnalyzer,
    gradient_scale,
)
from sonde.probe.outputs import floating_tensors
from sonde.show.flow import console
from sonde.show.flow.page import as_html

__all__ = [
    "AttentionAnalyzer",
    "BackwardHook",
    "ComparativeAnalyzer",
    "ConsoleReporter",
    "FlowAnalyzer",
    "FlowMetrics",
    "FlowReport",
    "ForwardHook",
    "GradientScale",
    "HTMLReportGenerator",
    "HookManager",
    "LayerHealth",
    "StandardAnalyzer",
    "TemporalAnalyzer",
    "gradient_scale",
]

Receive = Callable[[str, Tensor], Any]
"""Called with the name and a tensor without a graph."""
HookManager = HookList


class BackwardHook:
    """Makes hooks that collect gradients.

    with HookManager() as hooks:
        hooks.register_backward_hook(layer, BackwardHook.create("fc1", receive))
    """

    @staticmethod
    def create(name: str, receive: Receive) -> Callable[..., None]:
        """A backward hook that calls `receive(name, gradient)` for each gradient at the module's output."""

        def hook(module: Any, grad_input: Any, grad_output: Any) -> None:
            for suffix, grad in floating_tensors(grad_output):
                receive(name + suffix, grad.detach())

        return hook


class ForwardHook:
    """Makes hooks that collect activations."""

    @staticmethod
    def create(name: str, receive: Receive) -> Callable[..., None]:
        """A forward hook that calls `receive(name, activation)` for each tensor of the module's output."""

        def hook(module: Any, args: Any, output: Any) -> None:
            for suffix, activation in floating_tensors(output):
                receive(name + suffix, activation.detach())

        return hook


class ConsoleReporter:
    """Prints a report, or one part of it, in a terminal's colours; without them in a pipe."""

    def __init__(self, report: FlowReport | None = None) -> None:
        self.report = report

    def format_report(self, report: FlowReport | None = None) -> str:
        """The whole report as plain text."""
        return console.as_text(self._given(report))

    def print_summary(self, report: FlowReport | None = None) -> None:
        self._given(report).print_summary()

    def print_layer_summary(self, report: FlowReport | None = None) -> None:
        self._given(report).print_layers()

    def print_issues(self, report: FlowReport | None = None) -> None:
        self._given(report).print_issues()

    def print_recommendations(self, report: FlowReport | None = None) -> None:
        """The fix of each issue, as code."""
        for issue in self._given(report).issues:
            print(f"{issue.type} {issue.layer}".rstrip())
            print("\n".join(f"    {line}" for line in issue.recommendation.splitlines()))

    def _given(self, report: FlowReport | None) -> FlowReport:
        return _given(report, self.report)


class HTMLReportGenerator:
    """Writes a report as one self-contained HTML page."""

    def __init__(self, report: FlowReport | None = None) -> None:
        self.report = report

    def generate(self, report: FlowReport | None = None, output_path: str | Path | None = None) -> str:
        """The page; with `output_path`, also written there."""
        page = as_html(_given(report, self.report))
        if output_path is not None:
            Path(output_path).write_text(page, encoding="utf-8")
        return page


def _given(report: FlowReport | None, default: FlowReport | None) -> FlowReport:
    found = report if report is not None else default
    if found is None:
        raise UsageError("pass a report:  FlowAnalyzer(model).analyze(x, y, loss_fn)")
    return found
