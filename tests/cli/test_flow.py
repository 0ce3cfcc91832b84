"""`sonde flow`: a model that a script builds, analysed; what goes wrong is one line; critical is an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import torch
from torch import nn
from neighbour import WIDTH

print("built")

def mlp(activation, depth):
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), activation())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))

def batch():
    return torch.randn(16, WIDTH), torch.randint(3, (16,)), nn.CrossEntropyLoss()

def good():
    return mlp(nn.ReLU, 2), *batch()

def bad():
    return mlp(nn.Sigmoid, 12), *batch()

def as_dict():
    return dict(zip(("model", "x", "y", "loss_fn"), good()))

def own_loss():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = mlp(nn.ReLU, 1)
        def forward(self, x):
            return self.model(x).square().mean()
    return Own(), batch()[0]

def fails():
    return 1 / 0

def shapes():
    return mlp(nn.ReLU, 2), torch.randn(4, 99), None, lambda out: out.sum()

def nothing():
    return None

def wrong_key():
    return {"model": 1, "input": 2}

def no_model():
    return "model", 1

def needs(width):
    return mlp(nn.ReLU, width)

def inside():
    class Broken(nn.Module):
        def forward(self, x):
            return nn.functional.linear(x, torch.zeros(3, 99))
    return Broken(), torch.randn(4, 8), None, lambda out: out.sum()

CONSTANT = 3
"""


@pytest.fixture(autouse=True)
def script(own_folder: Path) -> None:
    Path("train.py").write_text(SCRIPT)
    Path("neighbour.py").write_text("WIDTH = 16\n")


@pytest.fixture(autouse=True)
def _forget_script() -> Any:
    import sys

    yield
    for name in ("train", "neighbour"):
        sys.modules.pop(name, None)


def test_a_healthy_model_takes_a_few_lines(sonde: Any) -> None:
    out = sonde("flow", "train.py:good").stdout
    assert "health 100/100 HEALTHY" in out
    assert "No issue" in out


def test_something_critical_is_exit_code_one(sonde: Any) -> None:
    out = sonde("flow", "train.py:bad", code=1).stdout
    assert "CRITICAL" in out
    assert "VANISHING" in out
    assert "model[0]" in out


def test_json_is_one_document_whatever_the_script_prints(sonde: Any) -> None:
    answer = sonde("flow", "train.py:bad", "--json", "--steps", "2", code=1)
    assert {issue["type"] for issue in answer.json["issues"]} >= {"VANISHING", "DECAY"}
    assert answer.json["layers"][0]["velocity"] > 0
    assert "built" in answer.stderr


def test_html_is_written(sonde: Any) -> None:
    answer = sonde("flow", "train.py:good", "--html", "flow.html")
    assert "Wrote flow.html" in answer.stderr
    assert Path("flow.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["as_dict", "own_loss"])
def test_other_ways_to_give_a_model(name: str, sonde: Any) -> None:
    assert "HEALTHY" in sonde("flow", f"train.py:{name}").stdout


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", "does not name a function"),
        ("nowhere.py:build", 'no script "nowhere.py"'),
        ("train.py:goood", 'no function "goood" in train.py. Did you mean "good"?'),
        ("train.py:CONSTANT", 'no function "CONSTANT" in train.py. Available: mlp, batch, good, bad, as_dict'),
        ("train.py:needs", "needs() in train.py is called without arguments: missing a required argument: 'width'"),
        ("train.py:fails", "fails() in train.py failed: ZeroDivisionError: division by zero"),
        ("train.py:shapes", "the analysis failed: RuntimeError: mat1 and mat2"),
        ("train.py:nothing", "nothing() returned NoneType. It must return (model, x, y, loss_fn)"),
        ("train.py:wrong_key", "has unknown keys: input"),
        ("train.py:no_model", "takes a torch.nn.Module; got str"),
    ],
)
def test_what_goes_wrong_is_one_line(target: str, message: str, sonde: Any) -> None:
    answer = sonde("flow", target, code=2)
    assert message in answer.stderr.splitlines()[-1]
    assert "Traceback" not in answer.stderr


def test_a_script_with_an_error_says_where(sonde: Any) -> None:
    Path("train.py").write_text("import torch\nx = undefined\n")
    assert "train.py:2)" in sonde("flow", "train.py:build", code=2).stderr


def test_an_error_in_the_model_points_at_the_users_own_line(sonde: Any) -> None:
    told = sonde("flow", "train.py:inside", code=2).stderr.splitlines()[-1]
    assert "RuntimeError: mat1 and mat2" in told
    line = SCRIPT.splitlines().index("            return nn.functional.linear(x, torch.zeros(3, 99))") + 1
    assert told.endswith(f"train.py:{line})")


def test_all_issues_and_layers_are_shown_when_asked_for(sonde: Any) -> None:
    assert "more: --all" in sonde("flow", "train.py:bad", code=1).stdout
    everything = sonde("flow", "train.py:bad", "--all", code=1).stdout
    assert "more:" not in everything
    assert "LAYER_VARIANCE" in everything
    assert "grad/weight" in everything


def test_documented_thresholds_are_an_option(sonde: Any) -> None:
    answer = sonde("flow", "train.py:good", "--absolute", "--json", code=1)
    assert answer.json["is_relative"] is False
    assert answer.json["issues"][0]["type"] == "VANISHING"  # of a healthy model whose loss is small


def test_a_report_that_cannot_be_written_is_not_a_critical_finding(sonde: Any) -> None:
    assert 'no folder "nowhere"' in sonde("flow", "train.py:good", "--html", "nowhere/flow.html", code=2).stderr
    Path("taken.html").mkdir()
    assert "cannot write taken.html" in sonde("flow", "train.py:good", "--html", "taken.html", code=2).stderr
