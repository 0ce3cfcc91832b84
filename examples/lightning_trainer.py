"""Lightning: one callback adds sonde to a `Trainer`.

You should see: no findings, and the values that `self.log` recorded, at their steps. Takes seconds.
Needs: pip install 'sonde-ml[lightning]'
"""

import lightning
import torch
from torch import Tensor, nn

import sonde
from sonde.adapters.lightning import SondeCallback


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
x = torch.randn(512, 10)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 32, shuffle=True)
trainer = lightning.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False, log_every_n_steps=1, callbacks=[SondeCallback(project="examples", name="lightning")],
)  # fmt: skip
trainer.fit(Regression(), loader)

run = sonde.open("latest")
print(run.findings())
print(run.scalars("loss"))
