"""Accelerate's own loop, with sonde as its tracker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sonde

accelerate = pytest.importorskip("accelerate")

from sonde.adapters.accelerate import SondeTracker  # noqa: E402
from sonde.testing.adapters import AdapterTests  # noqa: E402
from sonde.testing.by_hand import Net, Recipe  # noqa: E402

pytestmark = pytest.mark.slow


def train(net: Net, recipe: Recipe, tracker: SondeTracker | None) -> None:
    """As in Accelerate's examples, with a `finally`."""
    accelerator = accelerate.Accelerator(
        log_with=tracker, cpu=True, gradient_accumulation_steps=recipe.accumulate, mixed_precision="no"
    )
    loader = recipe.rows().loader()
    model, optimizer, loader = accelerator.prepare(net, recipe.optimizer(net), loader)
    if tracker is not None:
        accelerator.init_trackers("suite", config={"lr": recipe.lr})
        tracker.watch(model, optimizer)
    losses = []
    try:
        for batch in loader:
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                losses.append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.log({"loss": sum(losses) / len(losses)})
                losses.clear()
    finally:
        accelerator.end_training()


class TestAccelerate(AdapterTests):
    module, package = "sonde.adapters.accelerate", "accelerate"

    def recorder(self, **options: Any) -> SondeTracker:
        return SondeTracker(**options)

    def train(self, net: Any, recorder: Any) -> list[float]:
        train(net, self.recipe, recorder)
        return net.losses


class TestAccumulation(TestAccelerate):
    recipe = Recipe(accumulate=2)


@pytest.fixture
def accelerator(tmp_path):
    tracker = SondeTracker(dir=tmp_path / "runs", project="acc", verbose=False)
    yield accelerate.Accelerator(log_with=tracker, cpu=True), tracker
    sonde.finish()


def test_the_session_is_what_accelerate_hands_out(accelerator):
    accelerator, tracker = accelerator
    accelerator.init_trackers("acc", config={"lr": 0.1})
    assert accelerator.get_tracker("sonde", unwrap=True) is tracker.tracker
    assert sonde.open(tracker.tracker.path).config["lr"] == 0.1


def test_the_groups_of_a_wrapped_optimizer_are_recorded(accelerator):
    accelerator, tracker = accelerator
    net = Net()
    groups = [{"params": net.first.parameters(), "lr": 0.1}, {"params": net.second.parameters(), "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, Recipe().rows().loader())
    accelerator.init_trackers("acc")
    tracker.watch(model, optimizer)
    used = []
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)[0])
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    path = tracker.tracker.path
    accelerator.end_training()
    run = sonde.open(path)
    names = ("optim/lr", "optim/group1/lr")
    assert [run.scalars(name)["value"].to_pylist() for name in names] == [
        list(rates) for rates in zip(*used, strict=True)
    ]


def test_a_second_try_is_not_judged_by_the_first(tmp_path):
    """Training again, with smaller batches, where the first try has run out of memory."""
    try:
        raise MemoryError
    except MemoryError:
        train(Net(), Recipe(num_steps=2), SondeTracker(dir=tmp_path / "runs", verbose=False))
    assert sonde.open("latest", dir=tmp_path / "runs").status == "finished"
