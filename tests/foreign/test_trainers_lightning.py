"""Lightning's Trainer: automatic and manual optimization, several optimizers, clipping, averaging, resuming."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from synthetic import clusters
from tally import EXACT, Expected
from trial import Trial, Witnessed, trainer

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging

from sonde.adapters.lightning import SondeCallback

STEPS = 40


class OracleCallback(pl.Callback):
    """Attaches the oracle once the trainer has made the optimizers, and gives it what the module noted."""

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.oracle.watch(pl_module)
        for optimizer in trainer.optimizers:
            self.oracle.follow(optimizer)
        if pl_module.step:
            self.oracle.rewind(pl_module.step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for at, values in pl_module.noted.items():
            mean = sum(values) / len(values)
            self.oracle.scalars[at] = Expected(mean, 2.0**-22 * abs(mean) if len(values) > 1 else EXACT)


class Classifier(pl.LightningModule):
    """Notes by itself what it logs, at the step it counts by itself: of micro-batches the mean is wanted."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.lr = lr
        self.step = 0
        """How many steps the optimizers have made together."""
        self.noted: dict[tuple[str, int], list[float]] = defaultdict(list)
        self.losses: list[float] = []

    def note(self, name: str, value: Tensor) -> None:
        self.log(name, value)
        self.noted[name, self.step].append(value.item())
        self.losses.append(value.item())

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.note("train_loss", loss)
        return loss

    def optimizer_step(self, *args: Any, **given: Any) -> None:
        super().optimizer_step(*args, **given)
        self.step += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=self.lr)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps made"] = self.step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.step = checkpoint["steps made"]


class Validated(Classifier):
    """Logs twice an epoch of the held-out data, at the last step that was made."""

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        loss = functional.cross_entropy(self.net(x), y)
        self.log("val_loss", loss)
        self._held_out.append(loss.item())

    def on_validation_epoch_start(self) -> None:
        self._held_out: list[float] = []

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.noted["val_loss", self.step - 1] += self._held_out


def loader(num_batches: int = STEPS, seed: int = 0) -> Any:
    batches = list(islice(clusters(seed=seed), num_batches))
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=32)


def fit(
    trial: Trial, module: Any, *, batches: int = STEPS, ckpt_path: Any = None, callbacks: Any = (), **given: Any
) -> Any:
    watching = OracleCallback(trial.oracle) if isinstance(trial, Witnessed) else SondeCallback(**trial.options)
    made = pl.Trainer(
        callbacks=[*callbacks, watching],
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **given,
        },
    )
    made.fit(module, loader(batches), loader(4, seed=9) if isinstance(module, Validated) else None, ckpt_path=ckpt_path)
    trial.trained(module, made.optimizers, module.losses)
    return made


@trainer("Lightning", is_quick=True)
def automatic(trial: Trial) -> None:
    fit(trial, Classifier())


@trainer("Lightning, clipping by norm", is_quick=True)
def clip_norm(trial: Trial) -> None:
    fit(trial, Classifier(), gradient_clip_val=0.5)


@trainer("Lightning, clipping by value")
def clip_value(trial: Trial) -> None:
    fit(trial, Classifier(), gradient_clip_val=0.02, gradient_clip_algorithm="value")


@trainer("Lightning, accumulation", is_quick=True)
def accumulation(trial: Trial) -> None:
    fit(trial, Classifier(), batches=80, accumulate_grad_batches=4)


@trainer("Lightning, accumulation and clipping, last group incomplete")
def accumulation_clipped(trial: Trial) -> None:
    fit(trial, Classifier(), batches=42, max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=0.1)


@trainer("Lightning, bf16")
def bf16(trial: Trial) -> None:
    fit(trial, Classifier(), precision="bf16-mixed", gradient_clip_val=1.0)


@trainer("Lightning, true double precision")
def double(trial: Trial) -> None:
    fit(trial, Classifier(), precision="64-true")


@trainer("Lightning, validation in between", is_quick=True)
def validation(trial: Trial) -> None:
    fit(trial, Validated(), val_check_interval=10)


@trainer("Lightning, validation with accumulation, two epochs")
def validation_accumulated(trial: Trial) -> None:
    fit(trial, Validated(), max_epochs=2, accumulate_grad_batches=2)


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@trainer("Lightning, a schedule for every step")
def scheduled(trial: Trial) -> None:
    fit(trial, Scheduled())


class Closing(Classifier):
    """L-BFGS calls the closure several times a step: the last loss is the one Lightning keeps."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.3, max_iter=3)

    def note(self, name: str, value: Tensor) -> None:
        self.noted[name, self.step].clear()
        super().note(name, value)


@trainer("Lightning, L-BFGS")
def lbfgs(trial: Trial) -> None:
    fit(trial, Closing(), batches=15)


class Manual(Classifier):
    """Backward, clipping and step by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        loss = functional.cross_entropy(self.net(x), y)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        self.note("train_loss", loss)
        optimizer.step()
        self.step += 1


@trainer("Lightning, manual", is_quick=True)
def manual(trial: Trial) -> None:
    fit(trial, Manual())


class ManualAccumulated(Manual):
    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        loss = functional.cross_entropy(self.net(x), y)
        self.manual_backward(loss / 4)
        self.note("train_loss", loss)
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            self.step += 1


@trainer("Lightning, manual with accumulation")
def manual_accumulated(trial: Trial) -> None:
    fit(trial, ManualAccumulated(), batches=80)


class Adversaries(Classifier):
    """A GAN: two optimizers in turn, one step together."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.ModuleDict(
            {
                "generator": nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 12)),
                "critic": nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
            }
        )

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in self.net.values()]

    def training_step(self, batch: Any, index: int) -> None:
        of_generator, of_critic = self.optimizers()
        real, fake = batch[0], self.net["generator"](torch.randn(32, 4))
        self.toggle_optimizer(of_critic)
        judged = functional.softplus(-self.net["critic"](real)) + functional.softplus(self.net["critic"](fake.detach()))
        of_critic.zero_grad()
        self.manual_backward(judged.mean())
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_generator)
        fooled = functional.softplus(-self.net["critic"](fake)).mean()
        of_generator.zero_grad()
        self.manual_backward(fooled)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.note("critic_loss", judged.mean())
        self.note("generator_loss", fooled)
        self.step += 1


@trainer("Lightning, two optimizers in turn")
def two_optimizers(trial: Trial) -> None:
    fit(trial, Adversaries(), batches=60)


class Averaged(Classifier):
    """Ends with an epoch without backward passes, for the batch norms. By docs/how-it-works.md, forward passes without
    gradients belong to no step; the last one does, because Lightning makes it inside of an optimizer step."""

    def __init__(self, aside: Callable[[], Any]) -> None:
        super().__init__()
        self.aside = aside
        self.is_stepping = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        is_look = self.trainer.fit_loop._skip_backward and not self.is_stepping
        with self.aside() if is_look else nullcontext():
            return super().training_step(batch, index)

    def optimizer_step(self, *args: Any, **given: Any) -> None:
        self.is_stepping = True
        super().optimizer_step(*args, **given)
        self.is_stepping = False


@trainer("Lightning, SWA")
def swa(trial: Trial) -> None:
    """The average takes the place of the weights at the end."""
    module = Averaged(lambda: trial.aside())  # Lightning copies the module, and would copy a method's trial
    fit(trial, module, batches=10, max_epochs=4, callbacks=[StochasticWeightAveraging(2e-3, swa_epoch_start=2)])


@trainer("Lightning, EMA")
def ema(trial: Trial) -> None:
    fit(trial, Classifier(), callbacks=[EMAWeightAveraging(decay=0.9)])


@trainer("Lightning, resumed from a checkpoint")
def resumed(trial: Trial) -> None:
    saving = ModelCheckpoint(dirpath="kept", filename="{step}", save_top_k=-1, every_n_train_steps=10)
    fit(trial, Classifier(), callbacks=[saving], enable_checkpointing=True, max_steps=20)
    _leave(trial)
    fit(trial, Classifier(), ckpt_path="kept/step=20.ckpt")


@trainer("Lightning, resumed from an older checkpoint", is_quick=True)
def resumed_older(trial: Trial) -> None:
    saving = ModelCheckpoint(dirpath="kept", filename="{step}", save_top_k=-1, every_n_train_steps=10)
    fit(trial, Classifier(), callbacks=[saving], enable_checkpointing=True, max_steps=20)
    _leave(trial)
    fit(trial, Classifier(), ckpt_path="kept/step=10.ckpt")


def _leave(trial: Trial) -> None:
    if isinstance(trial, Witnessed):
        trial.oracle.leave(trial.optimizers[0])


@pytest.mark.parametrize("program", trainer.of(__name__))
def test_trainer(program: Any, tmp_path: Path) -> None:
    program.examine(tmp_path).check()
