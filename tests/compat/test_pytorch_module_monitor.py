"""The snippets of pytorch-module-monitor run with only the import changed, and every name it documents exists."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sonde.compat import pytorch_module_monitor as compat

NAMES = """
ModuleMonitor StorageManager HooksManager MonitorMixin RefinedCoordinateCheck monitor_scaled_dot_product_attention
"""
METHODS = """
set_module set_reference_module has_reference_module remove_reference_module add_activation_metric
add_activation_difference_metric add_parameter_metric add_parameter_difference_metric add_gradient_metric begin_step
end_step after_micro_batch no_monitor is_step_monitored get_step_metrics get_all_metrics monitor_parameters
monitor_gradients log_tensor log_scalar log_scalars
"""

# The steps are those of the documentation; the loops around them are ours.
LOOP = """
from pytorch_module_monitor import ModuleMonitor
monitor = ModuleMonitor(
    monitor_step_fn=lambda step: step % 100 == 0, cpu_offload=False, excluded_modules_regex=r"pool", logger=None
)
monitor.set_module(model)
monitor.add_activation_metric(metric_name="norm", metric_fn=lambda x: x.norm(dim=-1), metric_regex=r"0")
monitor.add_parameter_metric("norm", lambda x: x.norm())
monitor.add_gradient_metric("norm", lambda x: x.norm())
for step in (0, 1, 100):
    monitor.begin_step(step)                 # Start monitoring step
    output = model(input)                     # Forward pass (hooks capture activations)
    loss = output.square().mean()
    loss.backward()                           # Backward pass
    monitor.monitor_parameters()              # Log parameter metrics
    monitor.monitor_gradients()               # Log gradient metrics
    optimizer.step()
    monitor.end_step()                        # Aggregate metrics for this step
    metrics = monitor.get_step_metrics()      # Retrieve metrics for logging
"""
MICRO_BATCHES = """
from pytorch_module_monitor import ModuleMonitor
monitor = ModuleMonitor()
monitor.set_module(model)
monitor.add_activation_metric("mean", lambda x: x.mean(), "0", metric_aggregation_fn=torch.amax)
step = 0
monitor.begin_step(step)
for micro_batch in batches:
    output = model(micro_batch)
    # ... backward, gradient accumulation
    monitor.after_micro_batch()           # Clear reference activations
monitor.end_step()                        # Aggregates across all micro-batches
"""
CUSTOM = """
from pytorch_module_monitor import ModuleMonitor, MonitorMixin
class Custom(nn.Module, MonitorMixin):
    def forward(self, x):
        self.get_module_monitor().log_tensor("custom", x.norm(dim=-1))
        return x
monitor = ModuleMonitor()
monitor.set_module(Custom())
monitor.begin_step(0)
monitor.module(x)
monitor.end_step()
"""
COORDINATES = """
from pytorch_module_monitor import ModuleMonitor, RefinedCoordinateCheck
monitor = ModuleMonitor()
monitor.set_module(model)
monitor.set_reference_module(reference)
rcc = RefinedCoordinateCheck(monitor)
monitor.begin_step(0)
reference(x)
model(x)
rcc.refined_coordinate_check()
monitor.end_step()
"""


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def test_every_documented_name_exists() -> None:
    assert set(NAMES.split()) == set(compat.__all__)
    assert [name for name in METHODS.split() if not callable(getattr(compat.ModuleMonitor, name, None))] == []


def test_training_loop(run_snippet: Any, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = run_snippet(
        LOOP, "pytorch_module_monitor", {"model": model, "input": torch.randn(3, 4), "optimizer": optimizer}
    )
    assert list(found["monitor"].get_all_metrics()) == [0, 100]
    assert {"activation/0/norm", "parameter/0.weight/norm", "gradient/2.bias/norm"} <= set(found["metrics"])


def test_micro_batches(run_snippet: Any, model: nn.Module) -> None:
    batches = [torch.randn(3, 4) for _ in range(3)]
    found = run_snippet(MICRO_BATCHES, "pytorch_module_monitor", {"model": model, "batches": batches})
    expected = max(model[0](batch).mean().item() for batch in batches)
    assert found["monitor"].get_step_metrics() == {"activation/0/mean": pytest.approx(expected)}


def test_a_module_logs_its_own_numbers(run_snippet: Any) -> None:
    x = torch.randn(3, 4)
    found = run_snippet(CUSTOM, "pytorch_module_monitor", {"x": x})
    assert found["monitor"].get_step_metrics()["custom"] == pytest.approx(x.norm(dim=-1).mean().item())


def test_refined_coordinate_check(run_snippet: Any, model: nn.Module) -> None:
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight += 0.1
    given = {"model": model, "reference": reference, "x": torch.randn(3, 4)}
    found = run_snippet(COORDINATES, "pytorch_module_monitor", given)
    assert found["monitor"].get_step_metrics()["RCC (W_t-W_0)x_t/0/l2norm"] > 0


def test_storage_combines_and_is_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = compat.StorageManager(logging.getLogger("mine"))
    for value in (1.0, 3.0):
        storage.log_scalar(0, "loss", value)
        storage.log_tensor(0, "largest", torch.tensor([value, 0.0]), torch.amax)
    storage.log_scalar(1, "loss", 5.0)
    assert storage.get_step_metrics(0) == {}
    with caplog.at_level(logging.INFO, "mine"):
        storage.aggregate_step(0)
    storage.aggregate_step(1)
    assert storage.get_all_metrics() == {0: {"loss": 2.0, "largest": 3.0}, 1: {"loss": 5.0}}
    assert "Logged 2 keys at step 0" in caplog.text
    path = storage.save_hdf5(tmp_path / "metrics.h5")
    assert compat.StorageManager.load_hdf5(path) == storage.get_all_metrics()


def test_hooks_are_removed_with_their_manager(model: nn.Module) -> None:
    calls: list[Any] = []
    hooks = compat.HooksManager()
    hooks.register_forward_hook(model[0], lambda *_: calls.append(1))
    hooks.register_forward_hook(model[2], lambda *_: calls.append(2))
    model(torch.randn(1, 4))
    hooks.remove(model[0])
    model(torch.randn(1, 4))
    assert (calls, len(hooks)) == ([1, 2, 2], 1)
    del hooks
    model(torch.randn(1, 4))
    assert calls == [1, 2, 2]
