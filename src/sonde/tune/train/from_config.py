"""Runs a `sonde train` file."""

from __future__ import annotations

import random
from typing import Any

from sonde.errors import UsageError
from sonde.tune.config import DataConfig, TuneConfig
from sonde.tune.train.data import generate
from sonde.tune.train.files import read_texts
from sonde.tune.train.wrapper import TrainingResult, TrainingWrapper


def train_from_config(config: TuneConfig, *, resume: bool = False, overwrite: bool = False) -> TrainingResult:
    """Read or generate the data, build the model, train."""
    rows, held_out = split_data(config.data, config.training.seed)
    wrapper = TrainingWrapper(
        model=config.model,
        training_method=config.method.name,
        method=config.method,
        keep=config.checkpoints,
        run=config.run,
        **config.training.model_dump(),
    )
    retained = None if config.data.retained_path is None else read_texts(config.data.retained_path)
    return wrapper.train(
        rows,
        config.output_dir,
        eval_dataset=held_out or None,
        retained_dataset=retained,
        resume=resume,
        overwrite=overwrite,
    )


def split_data(data: DataConfig, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and rows that are held out; the same for the same seed."""
    if data.path is not None:
        rows = read_texts(data.path)
    else:
        assert data.generate is not None
        rows = generate(data.generate, data.num_samples, seed)
    if not rows:
        raise UsageError(f"{data.path} contains no texts.")
    if data.eval_path is not None:
        return rows, read_texts(data.eval_path)
    rows = random.Random(seed).sample(rows, len(rows))
    num_held_out = int(len(rows) * data.eval_share)
    return rows[num_held_out:], rows[:num_held_out]
