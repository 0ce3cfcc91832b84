"""Hugging Face's Trainer, the real one, with tiny models."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sonde

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from sonde.adapters.transformers import SondeCallback, TracerCallback  # noqa: E402
from sonde.testing.adapters import AdapterTests, TruthTests  # noqa: E402
from sonde.testing.by_hand import BATCH, Net, Recipe, gradients_of  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the trainer's own


def settings(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": BATCH,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "seed": 0,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "label_names": ["y"],
        **given,
    }


def trained(folder: Path, *, callbacks: Any = (), resume: Any = None, net: Any = None, **given: Any) -> Trainer:
    rows = Recipe().rows()
    trainer = Trainer(
        net or Net(),
        TrainingArguments(**settings(folder, **given)),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class TrainerTests(TruthTests):
    def recorder(self, **options: Any) -> SondeCallback:
        return SondeCallback(**options)

    def train(self, net: Any, recorder: Any) -> list[float]:
        args = TrainingArguments(
            **settings(
                Path.cwd(),
                max_steps=self.recipe.num_steps,
                learning_rate=self.recipe.lr,
                max_grad_norm=self.recipe.clip,
                gradient_accumulation_steps=self.recipe.accumulate,
                bf16=self.recipe.is_bf16,
            )
        )
        Trainer(net, args, train_dataset=self.recipe.rows(), callbacks=[recorder] if recorder else []).train()
        return net.losses


class TestTrainer(TrainerTests, AdapterTests):
    module, package = "sonde.adapters.transformers", "transformers"


class TestAccumulation(TrainerTests):
    recipe = Recipe(accumulate=2)


class TestAutocast(TrainerTests):
    recipe = Recipe(is_bf16=True)


@pytest.fixture
def callback(tmp_path):
    yield lambda **given: SondeCallback(dir=tmp_path / "runs", project="hf", verbose=False, **given)
    sonde.finish()


def last_run(tmp_path: Path) -> Any:
    return sonde.open("latest", dir=tmp_path / "runs")


class Seen(TrainerCallback):
    """Gradients by hand, where the trainer says that they are ready."""

    def __init__(self) -> None:
        self.gradients: list[Any] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        self.gradients.append(gradients_of(model))


class TestLogs:
    def test_what_the_trainer_logs_is_at_its_step(self, tmp_path, callback):
        trainer = trained(tmp_path, callbacks=[callback()], eval_strategy="steps", eval_steps=3)
        run = last_run(tmp_path)
        assert run.scalars("loss")["value"].to_pylist() == losses(trainer)
        assert run.scalars("eval_loss")["step"].to_pylist() == [2, 5]
        assert run.config["learning_rate"] == 1e-2

    def test_an_evaluation_afterwards_is_in_the_run(self, tmp_path, callback, capfd):
        trainer = trained(tmp_path, callbacks=[callback()])
        value = trainer.evaluate()["eval_loss"]
        run = last_run(tmp_path)
        (row,) = run.scalars("eval_loss").to_pylist()
        assert (row["step"], row["value"]) == (5, value)
        assert (run.status, len(sonde.runs(dir=tmp_path / "runs"))) == ("finished", 1)
        assert "sonde" not in capfd.readouterr().err

    def test_two_trainings_in_one_session_follow_one_another(self, tmp_path):
        with sonde.init(project="two", dir=tmp_path / "runs", verbose=False):
            first, second = (trained(tmp_path, callbacks=[SondeCallback()], max_steps=3) for _ in range(2))
        run = last_run(tmp_path)
        assert run.scalars("loss")["step"].to_pylist() == list(range(6))
        assert run.scalars("loss")["value"].to_pylist() == losses(first) + losses(second)
        assert run.stats("grad/first.weight/norm")["step"].to_pylist() == list(range(6))

    def test_a_step_that_the_scaler_skips_counts_as_the_trainer_counts(self, tmp_path, callback):
        """Half precision on a GPU: where gradients are not finite, the optimizer does not step."""

        class Skips(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, optimizer=None, **given):
                inner = optimizer.optimizer
                vars(inner)["step"] = (lambda *_: None) if state.global_step == 2 else partial(type(inner).step, inner)

        trainer = trained(tmp_path, callbacks=[Skips(), callback()])
        run = last_run(tmp_path)
        assert run.scalars("loss")["value"].to_pylist() == losses(trainer)
        assert run.stats("grad/first.weight/norm")["step"].to_pylist() == [0, 1, 3, 4, 5]

    @pytest.mark.parametrize("names", [[], ["also as a callback"]])
    def test_by_name(self, tmp_path, monkeypatch, names):
        monkeypatch.setenv("SONDE_DIR", str(tmp_path / "runs"))
        monkeypatch.setenv("SONDE_VERBOSE", "0")
        trained(tmp_path, report_to="sonde", callbacks=[SondeCallback(name=name) for name in names])
        run = last_run(tmp_path)
        assert run.name in (names or [run.name])
        assert run.scalars("loss")["step"].to_pylist() == list(range(6))

    def test_the_name_in_layerclaw(self):
        assert TracerCallback is SondeCallback


class TestCheckpoints:
    def test_each_is_linked_to_its_step(self, tmp_path, callback):
        trained(tmp_path, callbacks=[callback()], save_strategy="steps", save_steps=2)
        table = last_run(tmp_path).checkpoints()
        assert table["step"].to_pylist() == [2, 4, 6]
        assert table["path"].to_pylist() == [str(tmp_path / "out" / f"checkpoint-{step}") for step in (2, 4, 6)]

    def test_a_resumed_training_continues_its_run(self, tmp_path, callback):
        options = {"save_strategy": "steps", "save_steps": 3}
        straight = trained(tmp_path / "straight", **options)
        trained(tmp_path, callbacks=[callback()], **options)
        runs = len(sonde.runs(dir=tmp_path / "runs"))
        resumed = trained(
            tmp_path, callbacks=[callback()], max_steps=8, resume=str(tmp_path / "out" / "checkpoint-3"), **options
        )
        run = last_run(tmp_path)
        assert len(sonde.runs(dir=tmp_path / "runs")) == runs == 1
        assert run.stats("grad/first.weight/norm")["step"].to_pylist() == list(range(8))
        assert run.scalars("loss")["step"].to_pylist() == list(range(8))
        assert losses(resumed)[3:6] == losses(straight)[3:6]

    def test_a_checkpoint_from_elsewhere_has_its_own_run(self, tmp_path, callback):
        """And not that of the checkpoints that lie where new ones go."""
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
        for folder in ("first", "second"):
            trained(tmp_path / folder, callbacks=[callback(name=folder)], **options)
        options |= {"max_steps": 4, "resume": str(tmp_path / "first" / "out" / "checkpoint-2")}
        trained(tmp_path / "second", callbacks=[callback()], **options)
        assert {run.name: run.last_step for run in sonde.runs(dir=tmp_path / "runs")} == {"first": 3, "second": 1}


class TestSequencesToSequences(TrainerTests):
    recipe = Recipe(num_steps=3)

    def net(self, error: BaseException | None = None) -> Any:
        torch.manual_seed(0)
        return T5ForConditionalGeneration(
            T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
        )

    def train(self, net: Any, recorder: Any, *others: Any) -> list[float]:
        generator = torch.Generator().manual_seed(1)
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (12, 8), generator=generator)]
        args = Seq2SeqTrainingArguments(**settings(Path.cwd(), max_steps=3, label_names=["labels"]))
        callbacks = [*others, *([recorder] if recorder else [])]
        trainer = Seq2SeqTrainer(net, args, train_dataset=rows, callbacks=callbacks)
        trainer.train()
        return losses(trainer)

    def by_hand(self) -> Any:
        seen = Seen()
        torch.manual_seed(3)
        return self.train(self.net(), None, seen), seen.gradients

    def raw_norms(self) -> Any:
        return []


RANKS = """
import sys
sys.path.insert(0, {tests!r})
from test_transformers import *

seen = Seen()
trained(Path({folder!r}), callbacks=[seen, SondeCallback(dir={folder!r} + "/runs", verbose=False)], max_steps=3)
if int(os.environ["RANK"]) == 0:
    Path({folder!r}, "norms").write_text(repr([float(np.linalg.norm(step["first.weight"])) for step in seen.gradients]))
"""


@pytest.mark.distributed
def test_two_processes_make_one_run_with_the_gradients_of_both(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(RANKS.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        line, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = sonde.runs(dir=tmp_path / "runs")
    assert run.status == "finished"
    wanted = ast.literal_eval((tmp_path / "norms").read_text())
    np.testing.assert_allclose(run.stats("grad/first.weight/norm")["value"].to_pylist(), wanted, rtol=1e-5)
