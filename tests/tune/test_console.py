"""A few lines where they are kept, one bar where someone looks; never every number of every step."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow  # transformers takes seconds to import


def train(has_bar: bool, num_steps: int = 200, eval_every: int = 100) -> None:
    from transformers import TrainerControl, TrainerState

    from sonde.tune.train.console import Console

    console = Console(has_bar=has_bar)
    state, control = TrainerState(max_steps=num_steps), TrainerControl()
    console.on_train_begin(None, state, control)
    for step in range(1, num_steps + 1):
        state.global_step = step
        control.should_evaluate = step % eval_every == 0
        console.on_step_end(None, state, control)
        console.on_log(None, state, control, logs={"loss": 1 / step, "grad_norm": 3.0, "num_tokens": 12})
        if control.should_evaluate:
            console.on_prediction_step(None, state, control)
            console.on_log(None, state, control, logs={"eval_loss": 0.5, "eval_runtime": 1.0})
            console.on_evaluate(None, state, control)
    console.on_train_end(None, state, control)


def test_a_log_file_gets_a_line_for_each_tenth_and_each_evaluation(capsys):
    train(has_bar=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step  20 of 200  loss 0.05"
    assert lines[4] == "step 100 of 200  loss 0.01, held-out loss 0.5"
    assert len(lines) == 10


def test_a_terminal_gets_one_bar_and_a_line_for_each_evaluation(capsys):
    train(has_bar=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "200/200" in err
    assert "grad_norm" not in err
    assert err.count("held-out loss") == 2


def test_bars_of_datasets_come_back(tmp_path):
    import datasets

    from sonde.tune.train.console import calm

    with calm(10):
        assert datasets.are_progress_bars_disabled()
    assert not datasets.are_progress_bars_disabled()
    with calm(1_000_000):
        assert not datasets.are_progress_bars_disabled()
