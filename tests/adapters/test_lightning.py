"""Lightning's Trainer, the real one: automatic and manual optimization, several optimizers, precision, exceptions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sonde

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from sonde.adapters.lightning import SondeCallback, TracerCallback
from sonde.testing.adapters import AdapterTests, TruthTests
from sonde.testing.by_hand import Net, Recipe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the trainer's own

RECIPE = Recipe()
NUM_STEPS = RECIPE.num_steps


class Module(pl.LightningModule):
    def __init__(self, net: Net | None = None, recipe: Recipe = RECIPE, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.net, self.recipe = net or Net(), recipe

    def training_step(self, batch, index):
        loss, _ = self.net(**batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(**batch)[0])

    def test_step(self, batch, index):
        self.log("test_loss", self.net(**batch)[0])

    def configure_optimizers(self):
        return self.recipe.optimizer(self.net)


class Manual(Module):
    """Two optimizers that step in turn, as in a GAN."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        loss, _ = self.net(**batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("train_loss", loss)

    def configure_optimizers(self):
        return self.recipe.optimizer(self.net.first), self.recipe.optimizer(self.net.second)


def trainer(folder: Any, *, callbacks: list[Any], **given: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "max_steps": NUM_STEPS,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "num_sanity_val_steps": 1,
        **given,
    }
    return pl.Trainer(callbacks=callbacks, **options)


def fit(module: Module, folder: Any, *, callbacks: list[Any], ckpt_path: Any = None, **given: Any) -> pl.Trainer:
    made = trainer(folder, callbacks=callbacks, **given)
    made.fit(module, module.recipe.rows().loader(), module.recipe.rows().loader(), ckpt_path=ckpt_path)
    return made


class LightningTests(TruthTests):
    loss_name, prefix = "train_loss", "net."

    def recorder(self, **options: Any) -> SondeCallback:
        return SondeCallback(**options)

    def train(self, net: Any, recorder: Any) -> list[float]:
        options = {
            "max_steps": self.recipe.num_steps,
            "accumulate_grad_batches": self.recipe.accumulate,
            "gradient_clip_val": self.recipe.clip,
            "precision": "bf16-mixed" if self.recipe.is_bf16 else "32-true",
        }
        fit(Module(net, self.recipe), ".", callbacks=[recorder] if recorder else [], **options)
        return net.losses


class TestAutomatic(LightningTests, AdapterTests):
    module, package = "sonde.adapters.lightning", "lightning"
    alternatives = ("pytorch_lightning",)


class TestAccumulation(LightningTests):
    recipe = Recipe(accumulate=2, num_steps=3)


class TestAutocast(LightningTests):
    recipe = Recipe(is_bf16=True)


class TestManual(LightningTests):
    def train(self, net: Any, recorder: Any) -> list[float]:
        callbacks = [recorder] if recorder else []
        fit(Manual(net, self.recipe), ".", callbacks=callbacks, max_steps=2 * self.recipe.num_steps)
        return net.losses


@pytest.fixture
def callback(tmp_path):
    yield lambda **given: SondeCallback(dir=tmp_path / "runs", project="pl", verbose=False, **given)
    sonde.finish()


def last_run(tmp_path):
    return sonde.open("latest", dir=tmp_path / "runs")


def test_numbers_are_at_their_step_and_once(tmp_path, callback):
    module = Module()
    fit(module, tmp_path, callbacks=[callback()], val_check_interval=3)
    run = last_run(tmp_path)
    assert run.scalars("train_loss")["step"].to_pylist() == list(range(NUM_STEPS))
    assert run.scalars("val_loss")["step"].to_pylist() == [2, 5]
    assert run.config["width"] == 8


def test_a_resumed_training_continues_its_run(tmp_path, callback):
    checkpoint = str(tmp_path / "at.ckpt")
    trainer = fit(Module(), tmp_path, callbacks=[callback()], max_steps=3)
    trainer.save_checkpoint(checkpoint)
    module = Module()
    fit(module, tmp_path, callbacks=[callback()], ckpt_path=checkpoint)
    run = last_run(tmp_path)
    assert len(sonde.runs(dir=tmp_path / "runs")) == 1
    assert run.stats("grad/net.first.weight/norm")["step"].to_pylist() == list(range(NUM_STEPS))


def test_the_name_in_layerclaw():
    assert TracerCallback is SondeCallback


class Seldom(Module):
    def training_step(self, batch, index):
        if index % 3 == 2:
            self.log("seldom", float(index))
        return super().training_step(batch, index)

    def on_train_epoch_end(self):
        self.log("epoch", float(self.current_epoch))


@pytest.mark.parametrize(("name", "steps"), [("seldom", [2, 5, 8, 11]), ("epoch", [5, 11])])
def test_a_number_that_is_logged_now_and_then_is_there_now_and_then(tmp_path, callback, name, steps):
    fit(Seldom(), tmp_path, callbacks=[callback()], max_steps=-1, max_epochs=2)
    assert last_run(tmp_path).scalars(name)["step"].to_pylist() == steps


@pytest.mark.parametrize(("name", "call"), [("val_loss", pl.Trainer.validate), ("test_loss", pl.Trainer.test)])
def test_what_is_measured_afterwards_is_in_the_run(tmp_path, callback, capfd, name, call):
    module, made = Module(), trainer(tmp_path, callbacks=[callback()])
    made.fit(module, RECIPE.rows().loader())
    (measured,) = call(made, module, RECIPE.rows().loader(), verbose=False)
    run = last_run(tmp_path)
    (row,) = run.scalars(name).to_pylist()
    assert (row["step"], row["value"]) == (NUM_STEPS - 1, pytest.approx(measured[name]))
    assert (run.status, len(sonde.runs(dir=tmp_path / "runs"))) == ("finished", 1)
    assert "sonde" not in capfd.readouterr().err


def test_a_termination_is_no_good_end(tmp_path, callback):
    with pytest.raises(SystemExit):
        fit(Module(Net(SIGTERMException())), tmp_path, callbacks=[callback()])
    assert last_run(tmp_path).status == "interrupted"


RANKS = """
import sys
sys.path.insert(0, {tests!r})
from test_lightning import *

callback = SondeCallback(dir={folder!r} + "/runs", verbose=False)
fit(Module(), {folder!r}, callbacks=[callback], devices=2, strategy="ddp", max_steps=3)
"""


@pytest.mark.distributed
def test_two_processes_that_lightning_starts_make_one_run(tmp_path):
    """It tells its processes their rank by no variable."""
    script = tmp_path / "train.py"
    script.write_text(RANKS.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = sonde.runs(dir=tmp_path / "runs")
    assert run.status == "finished"
    assert run.stats("grad/net.first.weight/norm")["step"].to_pylist() == [0, 1, 2]
