"""Hugging Face's Trainer, the real one, with a tiny model built from a configuration."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sonde

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from sonde.adapters.transformers import SondeCallback, TracerCallback  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the trainer's own


def tiny() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def texts(num: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 32, (num, 8), generator=generator)
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in rows]


def settings(folder: Path, **given: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "seed": 0,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **given,
    }


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(**settings(folder, **given))


def trained(folder: Path, *, callbacks: list[Any] | None = None, resume: Any = None, **given: Any) -> Trainer:
    trainer = Trainer(tiny(), arguments(folder, **given), train_dataset=texts(), callbacks=callbacks or [])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def callback(tmp_path):
    yield lambda **given: SondeCallback(dir=tmp_path / "runs", project="hf", verbose=False, **given)
    sonde.finish()


def last_run(tmp_path: Path) -> Any:
    return sonde.open("latest", dir=tmp_path / "runs")


class GradientNorms(TrainerCallback):
    """By hand, where the trainer says gradients are ready."""

    def __init__(self) -> None:
        self.norms: dict[str, list[float]] = {}

    def on_pre_optimizer_step(self, args, state, control, model=None, **given):
        for name, parameter in model.named_parameters():
            self.norms.setdefault(name, []).append(parameter.grad.double().norm().item())


class TestTrainer:
    @pytest.mark.parametrize("given", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
    def test_gradients_are_those_of_a_loop_by_hand(self, tmp_path, callback, given):
        by_hand = GradientNorms()
        trained(tmp_path, callbacks=[by_hand, callback()], **given)
        run = last_run(tmp_path)
        assert run.status == "finished"
        table = run.stats("grad/*/norm").to_pandas()
        assert set(table.site) == set(by_hand.norms)
        for name, wanted in by_hand.norms.items():
            found = table[table.site == name].sort_values("step")
            assert found.step.tolist() == list(range(6))
            np.testing.assert_allclose(found.value, wanted, rtol=1e-5)

    def test_no_loss_changes_by_a_bit(self, tmp_path, callback):
        without = losses(trained(tmp_path / "a"))
        assert losses(trained(tmp_path / "b", callbacks=[callback()])) == without

    def test_what_the_trainer_logs_is_at_its_step(self, tmp_path, callback):
        trainer = Trainer(
            tiny(),
            arguments(tmp_path, eval_strategy="steps", eval_steps=3),
            train_dataset=texts(),
            eval_dataset=texts(8),
            callbacks=[callback()],
        )
        trainer.train()
        run = last_run(tmp_path)
        assert run.scalars("loss")["step"].to_pylist() == list(range(6))
        assert run.scalars("loss")["value"].to_pylist() == losses(trainer)
        assert run.scalars("eval_loss")["step"].to_pylist() == [2, 5]
        assert run.config["learning_rate"] == 1e-2
        assert run.config["model"]["hidden_size"] == 16

    def test_a_session_of_the_user_is_used_and_left_open(self, tmp_path):
        with sonde.init(project="mine", dir=tmp_path / "runs", verbose=False) as session:
            trained(tmp_path, callbacks=[SondeCallback()])
            assert not session.is_finished
        run = last_run(tmp_path)
        assert (run.project, run.last_step) == ("mine", 5)

    def test_by_name(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SONDE_DIR", str(tmp_path / "runs"))
        monkeypatch.setenv("SONDE_VERBOSE", "0")
        trained(tmp_path, report_to="sonde")
        assert last_run(tmp_path).last_step == 5

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
        assert run.stats("grad/model.norm.weight/norm")["step"].to_pylist() == list(range(8))
        assert run.scalars("loss")["step"].to_pylist() == list(range(8))
        assert losses(resumed)[3:6] == losses(straight)[3:6]


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_transformers import *

class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **given):
        if state.global_step == 3:
            raise {error}

trained(Path({folder!r}), callbacks=[SondeCallback(dir={folder!r} + "/runs", verbose=False), Fails()])
"""


@pytest.mark.parametrize(("error", "status"), [("RuntimeError('no')", "crashed"), ("KeyboardInterrupt", "interrupted")])
def test_how_a_run_ends(tmp_path, error, status):
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path), error=error)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False
    )
    assert done.returncode != 0
    assert last_run(tmp_path).status == status


def test_a_trainer_of_sequences_to_sequences(tmp_path, callback):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    args = Seq2SeqTrainingArguments(**settings(tmp_path, max_steps=3))
    by_hand = GradientNorms()
    Seq2SeqTrainer(model, args, train_dataset=texts(), callbacks=[by_hand, callback()]).train()
    table = last_run(tmp_path).stats("grad/*/norm").to_pandas()
    for name in ("encoder.block.0.layer.0.SelfAttention.q.weight", "decoder.final_layer_norm.weight"):
        np.testing.assert_allclose(table[table.site == name].sort_values("step").value, by_hand.norms[name], rtol=1e-5)


RANKS = """
import sys
sys.path.insert(0, {tests!r})
from test_transformers import *

norms = GradientNorms()
trained(Path({folder!r}), callbacks=[norms, SondeCallback(dir={folder!r} + "/runs", verbose=False)], max_steps=3)
if int(os.environ["RANK"]) == 0:
    Path({folder!r}, "norms").write_text(repr(norms.norms["model.norm.weight"]))
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
    np.testing.assert_allclose(run.stats("grad/model.norm.weight/norm")["value"].to_pylist(), wanted, rtol=1e-5)
