"""No rule raises, whatever the shape of what it is shown: windows drawn at random, and the oddest by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import sonde.diagnose
from sonde.diagnose.check import all_rules, check, required_series
from sonde.diagnose.rule import RULES, Found
from sonde.schema.names import Series
from sonde.schema.window import Column, Window
from windows import stack

NUM_WINDOWS: Final = int(os.environ.get("SONDE_TEST_ODD_WINDOWS", "12"))
"""Some thousand before a release; a dozen of them each time."""
LAYERS: Final = (
    ("Linear 8 8", "ReLU", "Linear 8 8", "Softmax"),
    ("Embedding 8 8", "MultiheadAttention 8 8", "LayerNorm 8 8", "LSTM 8 8", "Dropout", "Linear 8 4"),
    ("Conv2d 3 8 3 3", "BatchNorm1d 8 1", "ReLU", "Tanh", "Sigmoid", "Linear 8 1"),
)
STRAY: Final = ("never.in.the.model", "a/b//c", "", "batch.0", "q_proj.lora_A.weight", "q_proj.lora_B.weight")
SCALARS: Final = ("loss", "val_loss", "val/accuracy", "lr", "lr/0", "clock", "system/rss_mib", "system/step_time_s")
VALUES: Final[dict[str, Callable[[int], Any]]] = {
    "steady": lambda n: np.full(n, 0.5),
    "falling": lambda n: np.geomspace(1.0, 1e-9, n) if n else np.empty(0),
    "rising": lambda n: np.geomspace(1e-9, 1e9, n) if n else np.empty(0),
    "noise": lambda n: np.random.default_rng(n).normal(size=n),
    "zeros": np.zeros,
    "all nan": lambda n: np.full(n, np.nan),
    "all infinite": lambda n: np.full(n, np.inf),
    "half nan": lambda n: np.where(np.arange(n) % 2, np.nan, 1.0),
    "huge": lambda n: np.full(n, 1e300),
    "negative": lambda n: np.full(n, -1.0),
}
STEPS: Final[dict[str, Callable[[int], Any]]] = {
    "every": np.arange,
    "none": lambda n: np.arange(0),
    "one": lambda n: np.arange(1),
    "two": lambda n: np.arange(2),
    "gaps": lambda n: np.flatnonzero(np.random.default_rng(n).random(n) < 0.3),
    "late": lambda n: np.arange(n // 2, n),
    "last": lambda n: np.arange(n - 1, n),
    "far": lambda n: np.arange(n) * 1_000_000_007,
}
EVENTS: Final = (
    {"type": "nonfinite", "step": 3},
    {"type": "nonfinite", "step": 1, "details": None},
    {"type": "nonfinite", "step": 0, "details": {"site": "1", "role": "input", "after": "0", "sites": ["1", "2"]}},
    {"type": "skipped_step", "step": 2, "details": {}},
    {"type": "fingerprint", "step": 2, "details": {"rank": 1}},
    {"type": "fingerprint", "step": 1, "details": {"rank": "one", "value": "much"}},
    {"type": "fingerprint", "step": 0, "details": [1, 2]},
    {"type": "fingerprint", "step": None, "details": None},
    {"type": "nonfinite", "step": 2, "details": {"micro_batch": "first", "sites": None, "rank": "x"}},
    {"type": "anything"},
)


def inspections() -> list[str]:
    """Series that rules read in addition to those they declare, as written in their source."""
    folder = Path(sonde.diagnose.__file__).parent
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py")))
    named = re.findall(r'"((?:unit|attn|rnn|data|model)/[^"/]+/[a-z_]+)"', text)
    return sorted({re.sub(r"\{[^}]*\}", "*", name) for name in named})


PATTERNS: Final = tuple(dict.fromkeys((*required_series(), *inspections())))


def column(steps: str, values: str, num_steps: int) -> Column:
    at = STEPS[steps](num_steps).astype(np.int64)
    return at, np.asarray(VALUES[values](len(at)), float)


def odd_window(seed: int) -> Window:
    """A window with or without a model, where each pattern has its own steps and values and some are missing."""
    random = np.random.default_rng(seed)
    num_steps = int(random.choice([1, 3, 40, 400]))
    document = stack(*LAYERS[random.integers(len(LAYERS))])
    sites = [*named(document), *[site for site in STRAY if random.random() < 0.5]]

    def shape() -> Column:
        return column(random.choice(sorted(STEPS)), random.choice(sorted(VALUES)), num_steps)

    series: dict[Series, Column] = {}
    for kind, site, stat in (pattern.split("/") for pattern in PATTERNS if random.random() < 0.8):
        usual = shape()
        for name in [site.replace("*", name) for name in sites] if "*" in site else [site]:
            series[Series(kind, name, stat)] = usual if random.random() < 0.9 else shape()
    scalars = {name: shape() for name in SCALARS if random.random() < 0.7}
    documents: list[Any] = [document, document, {}, None, {"modules": [{}], "parameters": [{}], "optimizers": [{}]}]
    facts = {
        "model": documents[random.integers(len(documents))],
        "events": [event for event in EVENTS if random.random() < 0.5],
    }
    return Window(series, scalars, facts)


def named(document: Mapping[str, Any]) -> list[str]:
    return [entry["name"] for part in ("modules", "parameters") for entry in document[part]]


def broken(window: Window) -> list[str]:
    errors: list[str] = []
    check(window, on_error=lambda rule, error: errors.append(f"{rule}: {error!r}"))
    return errors


@pytest.mark.parametrize("seed", range(NUM_WINDOWS))
def test_no_rule_raises_whatever_the_shape_of_the_window(seed: int) -> None:
    assert broken(odd_window(seed)) == []


def uniform(steps: str, values: str, num_steps: int = 40) -> Window:
    """Everything a rule could ask for, all of one shape."""
    document = stack(*LAYERS[1])
    series = {}
    for kind, site, stat in (pattern.split("/") for pattern in PATTERNS):
        for name in {site.replace("*", name) for name in named(document)}:
            series[Series(kind, name, stat)] = column(steps, values, num_steps)
    return Window(series, {name: column(steps, values, num_steps) for name in SCALARS}, {"model": document})


@pytest.mark.parametrize("steps", sorted(STEPS))
def test_no_rule_raises_where_all_series_share_one_odd_shape(steps: str) -> None:
    assert {values: errors for values in VALUES if (errors := broken(uniform(steps, values)))} == {}


def test_a_rule_that_raises_on_an_odd_window_is_caught_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(window: Window) -> Iterator[Found]:
        for site, steps, _ in window.by_site("grad/*/norm"):
            yield Found(site, step=steps[-1], confidence=1.0, remedy="")

    all_rules()
    monkeypatch.setitem(RULES, "careless", replace(RULES["nan_inf"], name="careless", function=careless))
    assert any(error.startswith("careless: IndexError") for error in broken(uniform("none", "zeros")))
