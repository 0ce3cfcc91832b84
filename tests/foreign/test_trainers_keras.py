"""Keras on TensorFlow, JAX and torch, each in a separate process: Keras chooses its back-end when it is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from comparison import Comparison
from examination import Answers, record

pytest.importorskip("keras")

QUICK = ("fit", "own train_step")
OTHERS = (
    "fit, clipping by norm, validation",
    "fit, dropout and batch norm, a schedule",
    "fit twice",
    "train_on_batch",
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
@pytest.mark.parametrize(
    "programs", [pytest.param(QUICK, id="quick", marks=pytest.mark.slow), pytest.param(OTHERS, id="others")]
)
def test_keras(backend: str, programs: tuple[str, ...], tmp_path: Path) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    here = Path(__file__).parent
    told = subprocess.run(
        [sys.executable, str(here / "keras_programs.py"), str(tmp_path), *programs],
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "PYTHONPATH": os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-3000:]
    found = json.loads((tmp_path / "answers.json").read_text())
    problems = []
    for name in programs:
        record(answers_of(found[name]))
        problems += [f"{name}: {line}" for line in found[name]["problems"]]
    assert not problems, "\n".join(problems)


def answers_of(found: dict) -> Answers:
    """As they were in the other process, with numbers in place of what was compared."""
    made = {key: value for key, value in found.items() if key not in ("values", "problems", "summary")}
    numbers = found["values"]
    counted = {name: numbers[name] for name in ("num_series", "num_values", "not_compared")}
    values = Comparison(**counted)
    values.different = [line for line in found["summary"].splitlines()[1:] if numbers["problems"]]
    return Answers(**made, values=values)
