"""Lightning's Trainer, the real one: automatic and manual optimization, several optimizers, precision, exceptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde

pytest.importorskip("lightning")

import lightning.pytorch as pl

from sonde.adapters.lightning import SondeCallback, TracerCallback

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the trainer's own

NUM_STEPS = 6


def batches() -> torch.utils.data.DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 4, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=4)


class Module(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.norms: dict[str, list[float]] = {}
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer):
        self.note()

    def note(self) -> None:
        for name, parameter in self.named_parameters():
            self.norms.setdefault(name, []).append(parameter.grad.double().norm().item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Module):
    """Two optimizers that step in turn, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        self.note()
        first.step()
        second.step()
        self.log("train_loss", loss)

    def on_before_optimizer_step(self, optimizer):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.1)


class Fails(Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch, index):
        if index == 3:
            raise self.error
        return super().training_step(batch, index)


def fit(module: Module, folder: Any, *, callbacks: list[Any], ckpt_path: Any = None, **given: Any) -> pl.Trainer:
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
    trainer = pl.Trainer(callbacks=callbacks, **options)
    trainer.fit(module, batches(), batches(), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def callback(tmp_path):
    yield lambda **given: SondeCallback(dir=tmp_path / "runs", project="pl", verbose=False, **given)
    sonde.finish()


def last_run(tmp_path):
    return sonde.open("latest", dir=tmp_path / "runs")


def check_gradients(run: Any, module: Module, num_steps: int = NUM_STEPS) -> None:
    table = run.stats("grad/*/norm").to_pandas()
    assert set(table.site) == set(module.norms)
    for name, wanted in module.norms.items():
        found = table[table.site == name].sort_values("step")
        assert found.step.tolist() == list(range(num_steps))
        np.testing.assert_allclose(found.value, wanted, rtol=1e-5)


@pytest.mark.parametrize("given", [{}, {"precision": "bf16-mixed"}])
def test_gradients_are_those_the_optimizer_uses(tmp_path, callback, given):
    module = Module()
    fit(module, tmp_path, callbacks=[callback()], **given)
    run = last_run(tmp_path)
    assert run.status == "finished"
    check_gradients(run, module)


def test_accumulated_gradients_make_one_step(tmp_path, callback):
    module = Module()
    fit(module, tmp_path, callbacks=[callback()], accumulate_grad_batches=2, max_steps=3)
    check_gradients(last_run(tmp_path), module, 3)


def test_manual_optimization_with_two_optimizers(tmp_path, callback):
    module = Manual()
    fit(module, tmp_path, callbacks=[callback()], max_steps=2 * NUM_STEPS)
    check_gradients(last_run(tmp_path), module)


def test_no_loss_changes_by_a_bit(tmp_path, callback):
    without, watched = Module(), Module()
    fit(without, tmp_path, callbacks=[])
    fit(watched, tmp_path, callbacks=[callback()])
    assert watched.losses == without.losses


def test_numbers_are_at_their_step_and_once(tmp_path, callback):
    module = Module()
    fit(module, tmp_path, callbacks=[callback()], val_check_interval=3)
    run = last_run(tmp_path)
    assert run.scalars("train_loss")["step"].to_pylist() == list(range(NUM_STEPS))
    np.testing.assert_allclose(run.scalars("train_loss")["value"].to_pylist(), module.losses, rtol=1e-6)
    assert run.scalars("val_loss")["step"].to_pylist() == [2, 5]
    assert run.config["width"] == 8


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("no"), "crashed"), (KeyboardInterrupt(), "interrupted")])
def test_how_a_run_ends(tmp_path, callback, error, status):
    with pytest.raises((RuntimeError, SystemExit, KeyboardInterrupt)):
        fit(Fails(error), tmp_path, callbacks=[callback()])
    run = last_run(tmp_path)
    assert run.status == status
    assert run.stats("grad/net.0.weight/norm")["step"].to_pylist() == [0, 1, 2]


def test_a_resumed_training_continues_its_run(tmp_path, callback):
    checkpoint = str(tmp_path / "at.ckpt")
    trainer = fit(Module(), tmp_path, callbacks=[callback()], max_steps=3)
    trainer.save_checkpoint(checkpoint)
    module = Module()
    fit(module, tmp_path, callbacks=[callback()], ckpt_path=checkpoint)
    run = last_run(tmp_path)
    assert len(sonde.runs(dir=tmp_path / "runs")) == 1
    assert run.stats("grad/net.0.weight/norm")["step"].to_pylist() == list(range(NUM_STEPS))


def test_the_name_in_layerclaw():
    assert TracerCallback is SondeCallback
