"""FlowReport: asked, printed and saved; the HTML is one safe file; numbers survive JSON."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sonde.errors import UsageError
from sonde.flow import FlowAnalyzer, FlowReport, analyze


@pytest.fixture
def sick(deep: Any) -> FlowReport:
    model = deep(activation=nn.Sigmoid, gain=1.0)
    return analyze(model, torch.randn(32, 32), torch.randint(4, (32,)), nn.CrossEntropyLoss())


@pytest.fixture
def well(deep: Any) -> FlowReport:
    return analyze(deep(depth=3), torch.randn(32, 32), torch.randint(4, (32,)), nn.CrossEntropyLoss())


def test_layers_are_in_the_order_of_the_forward_pass(well: FlowReport) -> None:
    assert [layer.name for layer in well.layers] == [*"0123456", "model"]
    assert well.layer("0").type == "Linear"
    assert well.layer("0").output_shape == (32, 32)
    with pytest.raises(KeyError, match=r"no layer 'nowhere'\. Known: 0, 1"):
        well.layer("nowhere")


def test_numbers_are_those_of_the_gradient() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(8, 4)
    weight = torch.randn(8, 3)
    (layer, _) = FlowAnalyzer(model).analyze(x, None, lambda out: (out * weight).sum()).layers
    assert layer.metrics.mean_pressure == pytest.approx(weight.abs().mean().item(), rel=1e-5)
    assert layer.metrics.max_pressure == pytest.approx(weight.abs().max().item(), rel=1e-6)
    spread = weight.abs().std(correction=0) / weight.abs().mean()
    assert layer.metrics.turbulence == pytest.approx(spread.item(), rel=1e-4)
    assert layer.metrics.grad_norm == pytest.approx(weight.norm().item(), rel=1e-5)
    grads = torch.cat([(weight.T @ x).flatten(), weight.sum(0)])
    assert layer.metrics.weight_grad_norm == pytest.approx(grads.norm().item(), rel=1e-5)


def test_velocity_is_the_change_from_part_to_part(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(4, 4)
    scale = torch.tensor([1.0, 3.0, 1.0, 3.0])[:, None]  # parts are every second sample: pressures 1 and 3
    report = FlowAnalyzer(model).analyze((x,), scale, lambda out, y: (out * y).sum(), steps=2)
    assert report.layer("0").metrics.velocity == pytest.approx(2.0)
    assert report.layer("0").metrics.mean_pressure == pytest.approx(2.0)
    report.print_layers()
    assert "velocity" in capsys.readouterr().out


def test_the_worst_come_first(sick: FlowReport) -> None:
    worst = sick.get_worst_layers(3)
    assert [layer.name for layer in worst] == ["0", "2", "4"]
    assert worst[0].health.status == "CRITICAL"
    assert worst[0].health.recommendations
    assert sick.status == "CRITICAL"
    severities = [issue.severity for issue in sick.issues]
    assert severities == sorted(severities, key=["CRITICAL", "HIGH", "MEDIUM", "LOW"].index)
    critical = sick.get_issues_by_severity("CRITICAL")
    assert {issue.severity for issue in critical} == {"CRITICAL"}
    assert sick.get_issues_by_severity("critical") == critical  # type: ignore[arg-type]
    with pytest.raises(UsageError, match='no severity "SEVERE"'):
        sick.get_issues_by_severity("SEVERE")  # type: ignore[arg-type]


def test_its_repr_is_one_line(sick: FlowReport) -> None:
    assert repr(sick) == f"<FlowReport: Sequential, health 0/100 CRITICAL, 26 modules, issues: {len(sick.issues)}>"


def test_json_is_read_back(sick: FlowReport, tmp_path: Path) -> None:
    read = json.loads(sick.save_json(tmp_path / "flow.json").read_text())
    assert read["status"] == "CRITICAL"
    assert len(read["layers"]) == len(sick.layers)
    assert read["issues"][0]["type"] == sick.issues[0].type
    assert read["details"]["decay"] < -1


def test_json_of_a_model_with_nan(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, math.nan)
    report = FlowAnalyzer(model).analyze(torch.ones(2, 2), None, lambda out: out.sum())
    assert report.health == 0.0
    assert "nan" in report.save_json(tmp_path / "flow.json").read_text()
    assert "NUMERICAL" in report.save_html(tmp_path / "flow.html").read_text()


def test_what_is_printed(sick: FlowReport, well: FlowReport, capsys: pytest.CaptureFixture[str]) -> None:
    sick.print_summary()
    out = capsys.readouterr().out
    assert "0/100 CRITICAL" in out
    assert "more: report.print_issues()" in out
    sick.print_issues()
    assert capsys.readouterr().out.count("VANISHING") >= 5
    sick.print_layers()
    assert "grad/weight" in capsys.readouterr().out
    well.print_summary()
    out = capsys.readouterr().out
    assert "No issue" in out
    assert "\x1b" not in out  # no colours into a pipe


def test_text_keeps_lines_of_code_whole(sick: FlowReport, tmp_path: Path) -> None:
    text = sick.save_text(tmp_path / "flow.txt").read_text()
    for issue in sick.issues:
        for line in issue.recommendation.splitlines():
            assert line in text


class Checked(HTMLParser):
    """Tags are closed in order, and nothing is loaded from elsewhere."""

    VOID = ("meta", "input", "br", "wbr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_whole_file_with_table_picture_and_issues(sick: FlowReport, tmp_path: Path) -> None:
    text = sick.save_html(tmp_path / "flow.html").read_text()
    parser = Checked()
    parser.feed(text)
    assert parser.open == []
    assert parser.seen.count("tr") == len(sick.layers) + 1
    assert parser.seen.count("article") == len(sick.issues)
    assert parser.seen.count("rect") == sum(layer.is_leaf for layer in sick.layers)
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert "overflow-x: auto" in text
    assert not re.search(r"https?://", text)


def test_the_notebook_sees_a_fragment_without_a_script(sick: FlowReport) -> None:
    fragment = sick._repr_html_()
    assert "<script" not in fragment
    assert "<html" not in fragment
    assert "sonde-flow" in fragment
    assert not re.search("<input|<button", fragment)  # which nothing would answer
    assert ":root" not in fragment  # the page's own


def test_names_cannot_smuggle_anything_in(tmp_path: Path) -> None:
    class Evil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("<script>alert(1)</script>", nn.Linear(2, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(self.children())(x)

    report = FlowAnalyzer(Evil()).analyze(torch.randn(2, 2), None, lambda out: out.sum())
    assert "<script>alert" not in report.save_html(tmp_path / "flow.html").read_text()
