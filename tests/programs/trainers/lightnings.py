"""Programs in Lightning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from sonde.adapters.lightning import SondeCallback
from trainers.points import blobs, convnet, curves, images, mlp
from trainers.program import program

STUCK = ("underfitting", "loss_plateau", "constant_output")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):
    """A module as in Lightning's own introduction."""

    def __init__(self, net: nn.Module, lr: float = 2e-3, optimizer: Any = torch.optim.Adam, **options: Any) -> None:
        super().__init__()
        self.net, self.lr, self.kind, self.options = net, lr, optimizer, options

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y) if y.dtype == torch.int64 else F.mse_loss(output, y)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("val_loss", self.loss(self(x), y))

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), self.lr, **self.options)


def fit(
    folder: Path, module: Any, data: Any, *, val: Any = None, steps: int = 200, batch: int = 32, shuffle: bool = True,
    loader: Any = None, **changes: Any,
) -> None:  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(folder), log_every_n_steps=10,
        callbacks=[SondeCallback(project="trainers", dir=str(folder), verbose=False)], **changes,
    )  # fmt: skip
    loader = loader or DataLoader(data, batch, shuffle=shuffle, drop_last=True)
    trainer.fit(module, loader, None if val is None else DataLoader(val, 128))


@program("lightning_lr_high", "lr_too_high", also_ok=("loss_oscillation", "dead_relu", "exploding_gradients", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    fit(folder, Classifier(mlp(16, 64, 64, 6), 2e-3 if fixed else 1.0), blobs(), val=blobs(256, seed=1))


@program("lightning_warmup_never_ends", "lr_too_low", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    class Warmed(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            steps = 20 if fixed else 100_000
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / steps, 1.0))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    fit(folder, Warmed(mlp(16, 64, 6)), blobs(), val=blobs(256, seed=1))


@program("lightning_decay_per_step", "lr_decay_too_fast", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    class Decayed(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.85)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "epoch" if fixed else "step"},
            }

    fit(folder, Decayed(mlp(16, 64, 64, 6), 1e-3), blobs(), val=blobs(256, seed=1))


@program("lightning_not_shuffled", "data_not_shuffled", also_ok=("loss_oscillation", "lr_too_high", "overfitting"))
def _(folder: Path, fixed: bool) -> None:
    x, y = blobs(960).tensors
    order = y.argsort()
    fit(folder, Classifier(mlp(16, 64, 6)), TensorDataset(x[order], y[order]), val=blobs(256, seed=1), shuffle=fixed)


@program("lightning_backbone_not_in_optimizer", "optimizer_missing_params", also_ok=STUCK, where="net.0")
def _(folder: Path, fixed: bool) -> None:
    class HeadOnly(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam((self if fixed else self.net[-1]).parameters(), self.lr)

    fit(folder, HeadOnly(mlp(8, 64, 64, 1)), curves())


@program("lightning_frozen", "frozen_layers", also_ok=STUCK, source="a fresh body, frozen as if it were pretrained")
def _(folder: Path, fixed: bool) -> None:
    net = convnet()
    if not fixed:
        net[:8].requires_grad_(False)
    fit(folder, Classifier(net), images(), val=images(200, seed=1))


@program("lightning_overfitting", "overfitting")
def _(folder: Path, fixed: bool) -> None:
    data = blobs(1200 if fixed else 48, noise=2.0)
    fit(folder, Classifier(mlp(16, 128, 128, 6)), data, val=blobs(256, seed=1, noise=2.0), steps=200, batch=24)


@program("lightning_softmax_twice", "wrong_loss_activation_pair", also_ok=STUCK)
def _(folder: Path, fixed: bool) -> None:
    net = mlp(16, 64, 6)
    fit(folder, Classifier(net if fixed else nn.Sequential(*net, nn.Softmax(-1))), blobs(), val=blobs(256, seed=1))


@program("lightning_manual_no_zero_grad", "missing_zero_grad", also_ok=("lr_too_high", "loss_oscillation", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    class Manual(Classifier):
        def __init__(self, *args: Any, **given: Any) -> None:
            super().__init__(*args, **given)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            loss = self.loss(self(batch[0]), batch[1])
            if fixed:
                optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log("train_loss", loss)

    fit(folder, Manual(mlp(16, 64, 6), 0.05, torch.optim.SGD), blobs(), val=blobs(256, seed=1))


@program("lightning_eval_mode", "eval_mode_training", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    class Evaluated(Classifier):
        def on_train_batch_start(self, *_: Any) -> None:
            if not fixed:
                self.net.eval()

    fit(folder, Evaluated(convnet()), images(), val=images(200, seed=1))


@program("lightning_raw_inputs", "unnormalised_inputs", also_ok=("lr_too_high", "loss_spikes", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    x, y = blobs().tensors
    fit(folder, Classifier(mlp(16, 64, 6), 2e-3), TensorDataset(x if fixed else 3000 + 900 * x, y))


@program("lightning_dropout", "excessive_dropout", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    p = 0.1 if fixed else 0.95
    net = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 6)
    )
    fit(folder, Classifier(net), blobs(), val=blobs(256, seed=1))


@program("lightning_adam_epsilon", "adam_epsilon_dominates", also_ok=("lr_too_low", *STUCK))
def _(folder: Path, fixed: bool) -> None:
    fit(folder, Classifier(mlp(16, 64, 6), 2e-3, eps=1e-8 if fixed else 10.0), blobs(), val=blobs(256, seed=1))


@program("lightning_same_batch", "data_duplication", also_ok=("overfitting",))
def _(folder: Path, fixed: bool) -> None:
    first = next(iter(DataLoader(blobs(), 32, shuffle=True)))
    loader = None if fixed else DataLoader([first] * 200, batch_size=None)
    fit(folder, Classifier(mlp(16, 64, 6)), blobs(), val=blobs(256, seed=1), loader=loader)


@program("h_lightning_blobs")
def _(folder: Path, fixed: bool) -> None:
    fit(folder, Classifier(mlp(16, 64, 64, 6)), blobs(), val=blobs(256, seed=1))


@program("h_lightning_images_clipped")
def _(folder: Path, fixed: bool) -> None:
    fit(folder, Classifier(convnet()), images(), val=images(200, seed=1), gradient_clip_val=1.0)


@program("h_lightning_accumulated")
def _(folder: Path, fixed: bool) -> None:
    fit(folder, Classifier(mlp(8, 64, 64, 1), 3e-3), curves(), val=curves(256, seed=1), steps=120, batch=16,
        accumulate_grad_batches=4)  # fmt: skip


@program("h_lightning_short")
def _(folder: Path, fixed: bool) -> None:
    fit(folder, Classifier(mlp(8, 64, 64, 1), 5e-4), curves(), steps=50)


@program("h_lightning_small_epochs", source="many epochs of ten batches, validated after each")
def _(folder: Path, fixed: bool) -> None:
    fit(folder, Classifier(mlp(16, 32, 6), weight_decay=1e-3), Subset(blobs(), range(320)), val=blobs(256, seed=1))


@program("h_lightning_gan")
def _(folder: Path, fixed: bool) -> None:
    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = mlp(8, 48, 48, 2)
            self.critic = mlp(2, 48, 48, 1)

        def training_step(self, batch: Any, index: int) -> None:
            first, second = self.optimizers()
            real = batch[0][:, :2]
            noise = torch.randn(len(real), 8)
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = self.generator(noise)
            g_loss = F.binary_cross_entropy_with_logits(self.critic(fake), ones)
            first.zero_grad()
            self.manual_backward(g_loss)
            first.step()
            d_loss = F.binary_cross_entropy_with_logits(self.critic(real), ones)
            d_loss = d_loss + F.binary_cross_entropy_with_logits(self.critic(fake.detach()), zeros)
            second.zero_grad()
            self.manual_backward(d_loss)
            second.step()
            self.log_dict({"g_loss": g_loss, "d_loss": d_loss})

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.Adam(net.parameters(), 1e-3, betas=(0.5, 0.99)) for net in (self.generator, self.critic)
            ]

    fit(folder, Gan(), blobs(), steps=400)
