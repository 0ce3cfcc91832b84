"""Lightning's Trainer, the real one: automatic and manual optimization, several optimizers, precision, exceptions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from sonde.adapters.lightning import SondeCallback, TracerCallback
from sonde.testing.adapters import AdapterTests, TruthTests
from sonde.testing.by_hand import Net, Recipe, gradients_of

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


class Accumulating(Module):
    """Steps after every third batch, by hand; notes what it logs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False
        self.noted: list[float] = []

    def training_step(self, batch, index):
        loss, _ = self.net(**batch)
        self.manual_backward(loss / 3)
        self.log("train_loss", loss)
        self.log_dict({"both": loss.detach() * 2}, on_step=True, on_epoch=True)
        if len(self.noted) % 3 == 0:
            self.log("first_only", loss)
        self.noted.append(loss.item())
        if len(self.noted) % 3 == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize("validate", [{}, {"val_check_interval": 2}])
def test_manual_accumulation_logs_the_mean_of_its_micro_batches(tmp_path, callback, validate):
    module = Accumulating(None, Recipe(num_steps=13))  # one step reaches over the end of the epoch
    fit(module, tmp_path, callbacks=[callback()], max_steps=-1, max_epochs=2, **validate)
    run = last_run(tmp_path)
    micro = np.array(module.noted[: len(module.noted) // 3 * 3]).reshape(-1, 3)
    steps = list(range(len(micro)))
    assert len(steps) >= 8
    for name, wanted in {
        "train_loss": micro.mean(axis=1),
        "both": 2 * micro.mean(axis=1),
        "first_only": micro[:, 0],
    }.items():
        table = run.scalars(name)
        assert table["step"].to_pylist()[: len(steps)] == steps, name
        np.testing.assert_allclose(table["value"].to_pylist()[: len(steps)], wanted, rtol=1e-6, err_msg=name)
    if validate:
        assert run.scalars("val_loss").num_rows > 3


def test_a_validation_between_micro_batches_does_not_cut_their_mean(tmp_path, callback):
    module = Module(None, Recipe(accumulate=4, num_steps=6))
    fit(module, tmp_path, callbacks=[callback()], accumulate_grad_batches=4, val_check_interval=2)
    micro = np.array(module.net.losses[: 4 * NUM_STEPS]).reshape(-1, 4)
    table = last_run(tmp_path).scalars("train_loss")
    assert table["step"].to_pylist() == list(range(NUM_STEPS))
    np.testing.assert_allclose(table["value"].to_pylist(), micro.mean(axis=1), rtol=1e-6)


class Clipping(Module):
    """Notes, in float64, the norm of every gradient before and after Lightning clips it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before: list[dict[str, float]] = []
        self.after: list[dict[str, float]] = []

    def norms(self) -> dict[str, float]:
        return {name: float(np.linalg.norm(grad)) for name, grad in gradients_of(self).items()}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.before.append(self.norms())
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        self.after.append(self.norms())


class ManualClipping(Clipping):
    """Two optimizers; the gradients of each are clipped before it steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.before.append({})
        self.after.append({})
        for part, optimizer in zip((self.net.first, self.net.second), self.optimizers(), strict=True):
            loss, _ = self.net(**batch)
            self.net.zero_grad()
            self.manual_backward(loss)
            mine = {f"net.{name}" for name, p in self.net.named_parameters() if any(p is q for q in part.parameters())}
            self.before[-1] |= {name: norm for name, norm in self.norms().items() if name in mine}
            self.clip_gradients(optimizer, 0.05, "norm")
            self.after[-1] |= {name: norm for name, norm in self.norms().items() if name in mine}
            optimizer.step()

    def configure_optimizers(self):
        return self.recipe.optimizer(self.net.first), self.recipe.optimizer(self.net.second)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_lightning_clips_is_of_its_step(algorithm, accumulate, precision, tmp_path, callback):
    module = Clipping(None, Recipe(accumulate=accumulate))
    fit(
        module,
        tmp_path,
        callbacks=[callback()],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.05 if algorithm == "norm" else 0.01,
        gradient_clip_algorithm=algorithm,
        precision=precision,
    )
    check_clips(module, last_run(tmp_path))


def test_what_two_optimizers_clip_by_hand_is_of_their_step(tmp_path, callback):
    module = ManualClipping()
    fit(module, tmp_path, callbacks=[callback()], max_steps=2 * NUM_STEPS)
    run = last_run(tmp_path)
    check_clips(module, run)
    for place, part in (("optim", "net.first"), ("optim/1", "net.second")):
        wanted = [np.hypot(step[f"{part}.weight"], step[f"{part}.bias"]) for step in module.before]
        np.testing.assert_allclose(run.scalars(f"{place}/grad_norm")["value"].to_pylist(), wanted, rtol=1e-5)


def check_clips(module: Clipping, run: Any) -> None:
    assert len(module.before) == NUM_STEPS
    for name in module.before[0]:
        for stat, noted in (("norm_preclip", module.before), ("norm", module.after)):
            table = run.stats(f"grad/{name}/{stat}")
            assert table["step"].to_pylist() == list(range(NUM_STEPS))
            wanted = [step[name] for step in noted]
            np.testing.assert_allclose(table["value"].to_pylist(), wanted, rtol=1e-5, err_msg=f"{name} {stat}")
        assert max(run.stats(f"grad/{name}/clip_factor")["value"].to_pylist()) < 1


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


class Scheduled(Manual):
    """Two optimizers, the second with two groups and a schedule."""

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net.first.parameters(), lr=0.1, momentum=0.9)
        weight, bias = self.net.second.parameters()
        second = torch.optim.AdamW([{"params": [weight], "lr": 0.2}, {"params": [bias], "lr": 0.3, "weight_decay": 0}])
        return [first, second], [torch.optim.lr_scheduler.LambdaLR(second, lambda step: 0.5**step)]

    def training_step(self, batch, index):
        super().training_step(batch, index)
        self.lr_schedulers().step()


def test_the_numbers_of_every_group_of_every_optimizer_are_recorded(tmp_path, callback):
    fit(Scheduled(), tmp_path, callbacks=[callback()], max_steps=2 * NUM_STEPS)
    run = last_run(tmp_path)
    rates = {name: run.scalars(name)["value"].to_pylist() for name in ("optim/lr", "optim/1/lr", "optim/1/group1/lr")}
    halved = [0.5**step for step in range(NUM_STEPS)]
    assert rates == {
        "optim/lr": [0.1] * NUM_STEPS,
        "optim/1/lr": pytest.approx([0.2 * by for by in halved]),
        "optim/1/group1/lr": pytest.approx([0.3 * by for by in halved]),
    }
    assert run.scalars("optim/momentum")["value"].to_pylist() == [0.9]
    assert run.scalars("optim/1/group1/weight_decay")["value"].to_pylist() == [0.0]


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


def test_a_terminated_run_is_not_finished(tmp_path, callback):
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
