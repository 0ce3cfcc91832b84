"""Accelerate's own loop, with sonde as its tracker."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sonde

accelerate = pytest.importorskip("accelerate")

from sonde.adapters.accelerate import SondeTracker  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def accelerator(tmp_path):
    tracker = SondeTracker(dir=tmp_path / "runs", project="acc", verbose=False)
    yield accelerate.Accelerator(log_with=tracker, cpu=True), tracker
    sonde.finish()


def test_a_loop_is_recorded_with_its_gradients(tmp_path, accelerator):
    accelerator, tracker = accelerator
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.init_trackers("acc", config={"lr": 0.1})
    tracker.watch(accelerator.unwrap_model(model), optimizer)
    norms = []
    for step in range(4):
        x = torch.full((2, 4), float(step + 1))
        loss = model(x).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        norms.append(model.weight.grad.double().norm().item())
        optimizer.step()
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.end_training()
    run = sonde.open("latest", dir=tmp_path / "runs")
    assert run.status == "finished"
    assert run.config["lr"] == 0.1
    assert run.scalars("loss").num_rows == 4
    np.testing.assert_allclose(run.stats("grad/weight/norm")["value"].to_pylist(), norms, rtol=1e-6)


def test_the_session_is_what_accelerate_hands_out(accelerator):
    accelerator, tracker = accelerator
    accelerator.init_trackers("acc")
    assert accelerator.get_tracker("sonde", unwrap=True) is tracker.tracker
