"""A trainer that returns to an older checkpoint, the real ones: what is read are two histories, each whole.

Each training keeps its own list of losses and gradient norms in float64, and sees other data than the one before.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.session.entry import current
from sonde.testing.by_hand import BATCH, Net, Rows

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the trainers' own

Made = list[tuple[float, float]]


class Scaled(Rows):
    """The same rows, times a factor."""

    def __init__(self, num_batches: int, factor: float) -> None:
        super().__init__(num_batches)
        self.x = self.x * factor


def norm_of(model: nn.Module) -> float:
    return float(model.first.weight.grad.double().square().sum().sqrt())


def check(run: sonde.Run, expected: Made, *, site: str, loss: str, first: int = 0) -> None:
    losses, norms = run.scalars(loss), run.stats(f"grad/{site}/norm")
    assert losses["step"].to_pylist() == norms["step"].to_pylist() == list(range(first, first + len(expected)))
    assert losses["value"].to_pylist() == pytest.approx([value for value, _ in expected], rel=1e-6)
    assert norms["value"].to_pylist() == pytest.approx([norm for _, norm in expected], rel=1e-6)


@pytest.fixture
def runs(tmp_path):
    yield tmp_path / "runs"
    sonde.finish()
    current.use(None)


# --------------------------------------------------------------------------------------------------------- Hugging Face


class TestHuggingFace:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    check = staticmethod(partial(check, site="first.weight", loss="loss"))

    def train(self, folder: Path, num_steps: int, factor: float, callbacks: Any = (), resume: Any = None) -> Made:
        """What was trained in this call."""
        from transformers import Trainer, TrainerCallback, TrainingArguments

        norms: list[float] = []

        class Norms(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **given: Any) -> None:
                norms.append(norm_of(model))

        args = TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=BATCH,
            max_steps=num_steps,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="steps",
            save_steps=5,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            train_sampling_strategy="sequential",
            label_names=["y"],
        )
        net = Net()
        Trainer(net, args, train_dataset=Scaled(24, factor), callbacks=[Norms(), *callbacks]).train(
            resume_from_checkpoint=resume
        )
        return list(zip(net.losses, norms, strict=True))

    def callback(self, **options: Any) -> Any:
        from sonde.adapters.transformers import SondeCallback

        return SondeCallback(project="hf", verbose=False, **options)

    def test_resumed_from_an_older_checkpoint(self, tmp_path, runs):
        first = self.train(tmp_path, 20, 1.0, [self.callback(dir=runs)])
        checkpoint = str(tmp_path / "out" / "checkpoint-10")
        second = self.train(tmp_path, 16, 2.0, [self.callback(dir=runs)], resume=checkpoint)
        assert (len(first), len(second)) == (20, 6)
        (run,) = sonde.runs(dir=runs)
        self.check(run, [*first[:10], *second])
        self.check(run.attempt(0), first)
        self.check(run.attempt(1), [*first[:10], *second])
        table = run.attempts().to_pydict()
        assert (table["first_step"], table["last_step"]) == ([0, 10], [19, 15])
        assert table["reason"] == ["start", "resume"]
        (event,) = [row for row in run.events().to_pylist() if row["type"] == "resumed"]
        assert "steps 10 to 19 of attempt 0 are abandoned" in event["message"]
        assert run.checkpoints()["step"].to_pylist() == [5, 10, 15, 16]
        assert run.attempt(0).checkpoints()["step"].to_pylist() == [5, 10, 15, 20]

    def test_snapshots_of_both_trainings_are_kept(self, tmp_path, runs):
        from transformers import TrainerCallback

        weights: list[dict[int, bytes]] = []

        class Weights(TrainerCallback):  # type: ignore[misc]
            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **given: Any) -> None:
                weights[-1][state.global_step] = model.first.weight.detach().numpy().tobytes()

        def train(num_steps: int, factor: float, resume: str | None = None) -> None:
            weights.append({})
            plan = sonde.Snapshots(when=lambda step: step % 5 == 2, kinds=("param",))
            ours = self.callback(dir=runs, watch={"snapshots": plan})
            self.train(tmp_path, num_steps, factor, [Weights(), ours], resume=resume)

        train(20, 1.0)
        train(16, 2.0, str(tmp_path / "out" / "checkpoint-10"))
        (run,) = sonde.runs(dir=runs)
        for shown, expected in ((run, {**weights[0], **weights[1]}), (run.attempt(0), weights[0])):
            steps = [0, 2, 7, 12] if shown is run else [0, 2, 7, 12, 17]
            assert shown.tensors.snapshots()["step"].to_pylist() == steps
            for step in steps:
                assert shown.tensors.snapshot(step)["param/first.weight"].tobytes() == expected[step]
        assert weights[0][12] != weights[1][12]
        assert run.tensors.snapshots()["attempt"].to_pylist() == [0, 0, 0, 1]
        assert run.verify() == []

    def test_resumed_from_the_last_checkpoint_abandons_nothing(self, tmp_path, runs):
        first = self.train(tmp_path, 10, 1.0, [self.callback(dir=runs)])
        second = self.train(tmp_path, 14, 1.0, [self.callback(dir=runs)], resume=True)
        (run,) = sonde.runs(dir=runs)
        self.check(run, [*first, *second])
        (event,) = [row for row in run.events().to_pylist() if row["type"] == "resumed"]
        assert event["severity"] == "info"

    def test_in_one_session_after_another_training(self, tmp_path, runs):
        """The run's steps are ahead of the trainer's; the checkpoint knows its step of the run."""
        with sonde.init("hf", dir=runs, verbose=False) as session:
            zeroth = self.train(tmp_path / "other", 4, 3.0, [self.callback(session=session)])
            first = self.train(tmp_path, 20, 1.0, [self.callback(session=session)])
            checkpoint = str(tmp_path / "out" / "checkpoint-10")
            second = self.train(tmp_path, 13, 2.0, [self.callback(session=session)], resume=checkpoint)
            third = self.train(tmp_path / "more", 3, 2.0, [self.callback(session=session)])
        (run,) = sonde.runs(dir=runs)
        self.check(run, [*zeroth, *first[:10], *second, *third])
        self.check(run.attempt(0), [*zeroth, *first])
        assert run.attempts()["first_step"].to_pylist() == [0, 14]

    def test_a_checkpoint_from_elsewhere_does_not_rewind_a_session_that_has_steps(self, tmp_path, runs):
        self.train(tmp_path / "elsewhere", 10, 1.0)
        with sonde.init("hf", dir=runs, verbose=False) as session:
            first = self.train(tmp_path, 4, 1.0, [self.callback(session=session)])
            checkpoint = str(tmp_path / "elsewhere" / "out" / "checkpoint-5")
            second = self.train(tmp_path / "x", 8, 2.0, [self.callback(session=session)], resume=checkpoint)
        (run,) = sonde.runs(dir=runs)
        self.check(run, [*first, *second])
        assert run.num_attempts == 1


# ------------------------------------------------------------------------------------------------------------ Lightning


class TestLightning:
    pytest.importorskip("lightning")
    check = staticmethod(partial(check, site="net.first.weight", loss="train_loss"))

    def train(
        self, folder: Path, num_steps: int, factor: float, callbacks: Any = (), ckpt_path: Any = None
    ) -> tuple[Made, Any]:
        import lightning.pytorch as pl

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.net = Net()
                self.norms: list[float] = []

            def training_step(self, batch: Any, index: int) -> Any:
                loss, _ = self.net(**batch)
                self.log("train_loss", loss)
                return loss

            def on_before_optimizer_step(self, optimizer: Any) -> None:
                self.norms.append(norm_of(self.net))

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=0.01)

        module = Module()
        trainer = pl.Trainer(
            max_steps=num_steps,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[
                pl.callbacks.ModelCheckpoint(folder / "kept", "{step}", save_top_k=-1, every_n_train_steps=5),
                *callbacks,
            ],
        )
        trainer.fit(module, Scaled(24, factor).loader(), ckpt_path=ckpt_path)
        return list(zip(module.net.losses, module.norms, strict=True)), trainer

    def callback(self, **options: Any) -> Any:
        from sonde.adapters.lightning import SondeCallback

        return SondeCallback(project="pl", verbose=False, **options)

    def test_resumed_from_an_older_checkpoint(self, tmp_path, runs):
        first, _ = self.train(tmp_path, 20, 1.0, [self.callback(dir=runs)])
        checkpoint = tmp_path / "kept" / "step=10.ckpt"
        second, _ = self.train(tmp_path, 16, 2.0, [self.callback(dir=runs)], checkpoint)
        assert (len(first), len(second)) == (20, 6)
        (run,) = sonde.runs(dir=runs)
        self.check(run, [*first[:10], *second])
        self.check(run.attempt(0), first)
        assert run.attempts()["first_step"].to_pylist() == [0, 10]

    def test_in_one_session(self, tmp_path, runs):
        with sonde.init("pl", dir=runs, verbose=False) as session:
            first, _ = self.train(tmp_path, 20, 1.0, [self.callback(session=session)])
            checkpoint = tmp_path / "kept" / "step=10.ckpt"
            second, _ = self.train(tmp_path, 13, 2.0, [self.callback(session=session)], checkpoint)
            third, _ = self.train(tmp_path / "more", 3, 2.0, [self.callback(session=session)])
        (run,) = sonde.runs(dir=runs)
        self.check(run, [*first[:10], *second, *third])
        self.check(run.attempt(0), first)

    def test_fit_again_without_a_checkpoint_continues(self, tmp_path, runs):
        """What the checkpoint of an earlier `fit` said must not be used twice."""
        with sonde.init("pl", dir=runs, verbose=False) as session:
            ours = self.callback(session=session)
            first, _ = self.train(tmp_path, 10, 1.0, [ours])
            checkpoint = tmp_path / "kept" / "step=5.ckpt"
            _, trainer = self.train(tmp_path, 8, 2.0, [ours], checkpoint)
            trainer.fit_loop.epoch_loop.max_steps = 11
            module = trainer.lightning_module
            trainer.fit(module, Scaled(24, 3.0).loader())
            both = list(zip(module.net.losses, module.norms, strict=True))
        (run,) = sonde.runs(dir=runs)
        self.check(run, [*first[:5], *both])
        assert run.attempts()["first_step"].to_pylist() == [0, 5]


# ----------------------------------------------------------------------------------------------------------- Accelerate


class TestAccelerate:
    pytest.importorskip("accelerate")

    def test_loading_a_state_returns_to_its_step(self, tmp_path, runs):
        from accelerate import Accelerator

        from sonde.adapters.accelerate import SondeTracker

        tracker = SondeTracker(project="acc", dir=runs, verbose=False)
        accelerator = Accelerator(cpu=True, log_with=tracker)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        accelerator.init_trackers("acc")
        tracker.watch(model, optimizer)
        accelerator.register_for_checkpointing(tracker)
        norms: list[float] = []

        def train(num_steps: int, factor: float) -> None:
            for _, batch in zip(range(num_steps), Scaled(num_steps, factor).loader(), strict=True):
                loss, _ = model(**batch)
                accelerator.backward(loss)
                norms.append(norm_of(net))
                optimizer.step()
                optimizer.zero_grad()
                accelerator.log({"loss": loss.item()})

        train(6, 1.0)
        accelerator.save_state(str(tmp_path / "state"))
        train(5, 1.0)
        accelerator.load_state(str(tmp_path / "state"))
        train(3, 2.0)
        accelerator.end_training()
        (run,) = sonde.runs(dir=runs)
        made = list(zip(net.losses, norms, strict=True))
        one = partial(check, site="first.weight", loss="loss")
        one(run, [*made[:6], *made[11:]])
        one(run.attempt(0), made[:11])
