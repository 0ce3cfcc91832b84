"""ModuleMonitor: the documented workflow, micro-batches, references, failures, files, runs; and the model untouched."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import sonde
from sonde.errors import NotAModelError, UsageError
from sonde.flow import ModuleMonitor, MonitorMixin, monitor_scaled_dot_product_attention


class Attention(nn.Module, MonitorMixin):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.is_monitoring:
            monitor_scaled_dot_product_attention(
                self.get_module_monitor(), module=self, query=q, key=k, value=v, activation=mixed, is_causal=True
            )
            self.get_module_monitor().log_tensor("custom_stat", x.norm(dim=-1))
            self.get_module_monitor().log_scalar("a_number", 3.0)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.attention, self.head = nn.Linear(4, 8), Attention(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(torch.relu(self.enter(x))).mean(1))


@pytest.fixture
def model() -> Network:
    torch.manual_seed(0)
    return Network()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 5, 4, generator=generator), torch.randint(2, (6,), generator=generator)


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def train(model: nn.Module, monitor: ModuleMonitor | None, steps: int = 3) -> list[dict[str, float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        x, y = batch(step)
        if monitor:
            monitor.begin_step(step)
        F.cross_entropy(model(x), y).backward()
        if monitor:
            monitor.monitor_parameters()
            monitor.monitor_gradients()
        optimizer.step()
        optimizer.zero_grad()
        if monitor:
            monitor.end_step()
            found.append(monitor.get_step_metrics())
    return found


def watched(model: nn.Module, **options: Any) -> ModuleMonitor:
    monitor = ModuleMonitor(**options)
    monitor.set_module(model)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    monitor.add_parameter_metric("norm", lambda x: x.norm())
    monitor.add_gradient_metric("norm", lambda x: x.norm())
    return monitor


def test_the_documented_workflow(model: Network) -> None:
    expected = model.enter(batch()[0]).mean().item()
    found = train(model, watched(model, monitor_step_fn=lambda step: step % 2 == 0))
    assert found[0]["activation/enter/mean"] == pytest.approx(expected)
    assert found[0]["custom_stat"] > 0
    assert found[0]["a_number"] == 3.0
    names = {name for name, _ in model.named_parameters()}
    assert {key.split("/")[1] for key in found[0] if key.startswith("gradient/")} == names
    assert {key.split("/")[1] for key in found[0] if key.startswith("parameter/")} == names
    assert "activation/[root module]/mean" in found[0]
    assert found[1] == {}  # not a step to watch
    assert found[2]["activation/enter/mean"] != found[0]["activation/enter/mean"]


def test_training_is_the_same_bit_for_bit(model: Network) -> None:
    plain = copy.deepcopy(model)
    monitor = watched(model)
    before = torch.get_rng_state()
    train(model, monitor)
    assert torch.equal(before, torch.get_rng_state())
    train(plain, None)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_model_keeps_no_trace(model: Network) -> None:
    before = pickle.dumps(model)
    monitor = watched(model)
    train(model, monitor, steps=0)
    assert pickle.dumps(model) == before
    twin = copy.deepcopy(model)
    assert twin.attention.get_module_monitor() is not monitor
    assert not twin.attention.is_monitoring
    assert all(not module._forward_hooks for module in model.modules())


def test_hooks_go_with_the_monitor_and_both_can_be_freed(model: Network) -> None:
    hooks = len(torch_module._global_forward_hooks)
    monitor = watched(model)
    assert len(torch_module._global_forward_hooks) == hooks + 1
    gone = weakref.ref(monitor), weakref.ref(model)
    monitor.detach()
    assert len(torch_module._global_forward_hooks) == hooks
    monitor = watched(model)
    del monitor
    gc.collect()
    assert gone[0]() is None
    assert len(torch_module._global_forward_hooks) == hooks
    assert len(getattr(torch_module, "_global_forward_hooks_with_kwargs", {})) == 0


def test_micro_batches_are_joined_by_the_mean_or_as_asked(model: Network) -> None:
    monitor = ModuleMonitor()
    monitor.set_module(model)
    monitor.add_activation_metric("sum", lambda x: x.sum(), r"enter")
    monitor.add_activation_metric("largest", lambda x: x.amax(-1), r"enter", torch.max)
    monitor.begin_step(0)
    outputs = []
    for seed in range(3):
        x, y = batch(seed)
        F.cross_entropy(model(x), y).backward()
        outputs.append(model.enter.forward(x))
        monitor.after_micro_batch()
    monitor.end_step()
    found = monitor.get_step_metrics()
    assert found["activation/enter/sum"] == pytest.approx(sum(o.sum().item() for o in outputs) / 3, rel=1e-5)
    assert found["activation/enter/largest"] == pytest.approx(max(o.max().item() for o in outputs))


def test_parameters_and_gradients_are_joined_as_asked_too(model: Network) -> None:
    monitor = ModuleMonitor()
    monitor.set_module(model)
    monitor.add_gradient_metric("largest", lambda g: g.norm(), "head.bias", metric_aggregation_fn=torch.amax)
    monitor.add_gradient_metric("last", lambda g: g.norm(), "head.bias", metric_aggregation_fn=lambda v: float(v[-1]))
    monitor.add_parameter_metric("sum", lambda p: p.sum(), "head.bias", metric_aggregation_fn=torch.sum)
    monitor.add_parameter_metric("many", lambda p: p, "head.bias", metric_aggregation_fn=lambda v: v)
    monitor.begin_step(0)
    norms = []
    for seed in (0, 1):
        x, y = batch(seed)
        F.cross_entropy(model(x), y).backward()
        norms.append(float(model.head.bias.grad.norm()))
        monitor.monitor_gradients()
        monitor.monitor_parameters()
    with pytest.warns(UserWarning, match="one number; this one returned 4"):
        monitor.end_step()
    metrics = monitor.get_step_metrics()
    assert metrics["gradient/head.bias/largest"] == max(norms)
    assert metrics["gradient/head.bias/last"] == norms[-1]
    assert metrics["parameter/head.bias/sum"] == pytest.approx(2 * model.head.bias.detach().sum().item())
    assert "parameter/head.bias/many" not in metrics


def test_names_are_chosen_excluded_and_formatted(model: Network) -> None:
    monitor = ModuleMonitor(
        excluded_modules_regex=r"attention\..*", format_module_name_fn=lambda name: name.replace("head", "HEAD")
    )
    monitor.set_module(model)
    monitor.add_activation_metric("rms", rms, r"HEAD|attention.*")
    monitor.begin_step(0)
    model(batch()[0])
    monitor.end_step()
    activations = {key for key in monitor.get_step_metrics() if key.startswith("activation/") and ".head_" not in key}
    assert activations == {"activation/HEAD/rms", "activation/attention/rms"}


def test_a_pattern_is_matched_from_the_start_of_a_name(model: Network) -> None:
    monitor = ModuleMonitor(excluded_modules_regex="head")
    monitor.set_module(model)
    monitor.add_activation_metric("rms", rms, "att")
    monitor.add_parameter_metric("rms", rms, "enter")
    monitor.begin_step(0)
    model(batch()[0])
    monitor.monitor_parameters()
    monitor.end_step()
    assert set(monitor.get_step_metrics()) >= {
        "activation/attention/rms", "activation/attention.qkv/rms", "activation/attention.out/rms",
        "parameter/enter.weight/rms", "parameter/enter.bias/rms",
    }  # fmt: skip
    assert not any("/head" in key or "root" in key for key in monitor.get_step_metrics())


def test_a_pattern_that_matches_nothing_is_reported_once(model: Network) -> None:
    monitor = watched(model)
    monitor.add_activation_metric("rms", rms, r".*mpl.*")
    monitor.add_activation_metric("heads", rms, r".*head_\d+")  # names that exist only while the model runs
    monitor.add_gradient_metric("rms", rms, r"mpl\..*")
    with pytest.warns(UserWarning, match="matches no") as told:
        train(model, monitor)
    messages = [str(warning.message) for warning in told]
    assert len(messages) == 2
    assert r"metric_regex='.*mpl.*' of the activation metric 'rms' matches no module" in messages[0]
    assert "Names: [root module], enter, attention" in messages[0]
    assert r"metric_regex='mpl\\..*' of the gradient metric 'rms' matches no parameter" in messages[1]
    assert "Names: enter.weight" in messages[1]


class Many(nn.Module):
    """Outputs that are not a single tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        out, _ = self.rnn(x)
        return {"logits": self.head(out), "states": [out, out.mean(1)], "count": 3}


def test_tensors_of_tuples_and_dicts_are_measured_and_compared() -> None:
    torch.manual_seed(0)
    model, x = Many(), torch.randn(2, 5, 4)
    reference = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight += 1.0
    monitor = ModuleMonitor()
    monitor.set_module(model)
    monitor.set_reference_module(reference)
    monitor.add_activation_metric("mean", lambda a: a.mean())
    monitor.add_activation_difference_metric("l2", lambda a, r: (a - r).norm())
    monitor.begin_step(0)
    reference(x)
    out = model(x)
    monitor.end_step()
    found = monitor.get_step_metrics()
    states, (h, c) = model.rnn(x)
    expected = {
        "rnn": states, "rnn:1.0": h, "rnn:1.1": c, "head": out["logits"], "[root module]": out["logits"],
        "[root module]:states.0": states, "[root module]:states.1": out["states"][1],
    }  # fmt: skip
    means = {key: value for key, value in found.items() if key.endswith("/mean")}
    assert means == {f"activation/{name}/mean": pytest.approx(t.mean().item()) for name, t in expected.items()}
    differences = {key.split("/")[1]: value for key, value in found.items() if key.endswith("/l2")}
    assert differences.keys() == expected.keys()
    assert {name for name, value in differences.items() if value} == {"head", "[root module]"}


def test_scalars_of_your_own(model: Network) -> None:
    monitor = ModuleMonitor(lambda step: step == 1)
    monitor.set_module(model)
    assert monitor.begin_step(0) is False
    monitor.log_scalars({"loss": 1.0, "lr": 0.1})
    monitor.log_scalars({"val_loss": torch.tensor(2.5)}, force=True)
    monitor.end_step()
    assert monitor.get_step_metrics() == {"val_loss": 2.5}
    assert monitor.begin_step(1) is True
    for loss in (1.0, 3.0):
        monitor.log_scalars({"loss": loss})
        monitor.log_scalar("largest", loss, max)
    monitor.end_step()
    monitor.log_scalar("val_loss", 2.0, force=True)
    assert monitor.get_all_metrics() == {0: {"val_loss": 2.5}, 1: {"loss": 2.0, "largest": 3.0, "val_loss": 2.0}}
    with pytest.warns(UserWarning, match="begin_step"):
        ModuleMonitor().log_scalar("early", 1.0, force=True)


def test_the_logger_gets_the_size_and_the_warnings(model: Network, caplog: pytest.LogCaptureFixture) -> None:
    monitor = watched(model, logger=logging.getLogger("mine"))
    monitor.add_activation_metric("bad", lambda x: 1 / 0, "enter")
    with caplog.at_level(logging.INFO, "mine"):
        train(model, monitor, steps=2)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO", "INFO"]
    assert "activation/enter/bad failed and is skipped" in caplog.messages[0]
    num_keys, size = len(monitor.get_step_metrics()), monitor.store.nbytes / 1e6
    assert caplog.messages[2] == f"Logged {num_keys} keys at step 1. Size of all logged metrics: {size:.2f} MB"
    assert 0 < monitor.store.nbytes < 20_000


def test_the_size_of_the_metrics_counts_every_number(model: Network) -> None:
    monitor = ModuleMonitor()
    monitor.set_module(model)
    sizes = []
    for step in range(3):
        monitor.begin_step(step)
        monitor.log_scalars({f"key{i}": float(i) for i in range(1000)})
        monitor.end_step()
        sizes.append(monitor.store.nbytes)
    assert sizes[0] > 1000 * (24 + 8 + len("key000"))
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] < sizes[0]  # the keys are shared


def test_cpu_offload_gives_the_metric_a_tensor_on_the_host(model: Network) -> None:
    seen = []
    monitor = ModuleMonitor(cpu_offload=True)
    monitor.set_module(model)
    monitor.add_activation_metric("device", lambda x: seen.append((x.device.type, x.requires_grad)) or 0.0)
    monitor.begin_step(0)
    model(batch()[0])
    assert set(seen) == {("cpu", False)}


def test_a_metric_may_change_what_it_is_given(model: Network) -> None:
    x, _ = batch()
    expected = model(x)
    monitor = ModuleMonitor()
    monitor.set_module(model)
    monitor.add_activation_metric("spoilt", lambda x: x.zero_().sum())
    monitor.begin_step(0)
    assert torch.equal(model(x), expected)


def test_no_monitor_looks_away(model: Network) -> None:
    monitor = watched(model)
    monitor.begin_step(0)
    with monitor.no_monitor():
        model(batch()[0])
        assert not monitor.is_monitoring
    assert monitor.is_monitoring
    monitor.end_step()
    assert monitor.get_step_metrics() == {}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_segment_is_counted_once(use_reentrant: bool) -> None:
    layer = nn.Linear(3, 3)
    calls = []

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=use_reentrant)

    model, monitor = Checkpointed(), ModuleMonitor()
    monitor.set_module(model)
    monitor.add_activation_metric("calls", lambda x: calls.append(1) or 0.0, "layer")
    monitor.begin_step(0)
    model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert calls == [1]


@pytest.mark.slow
def test_a_compiled_model_is_seen_at_its_boundary() -> None:
    plain = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    compiled = torch.compile(plain, backend="eager")
    monitor = ModuleMonitor()
    monitor.set_module(compiled)
    monitor.add_activation_metric("mean", lambda x: x.mean())
    x = torch.randn(5, 4)
    for step in range(2):
        monitor.begin_step(step)
        out = compiled(x)
        monitor.end_step()
        assert torch.equal(out, plain(x))
        assert monitor.get_step_metrics() == {"activation/[root module]/mean": pytest.approx(out.mean().item())}


def test_a_failing_metric_is_reported_once_and_the_others_stay(model: Network) -> None:
    monitor = watched(model)

    def failing(x: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    monitor.add_activation_metric("bad", failing)
    monitor.add_activation_metric("worse", lambda x: "word")
    monitor.add_activation_metric("late", lambda x: x, "enter", lambda values: 1 / 0)
    with pytest.warns(UserWarning, match="failed and is skipped") as told:
        found = train(model, monitor)
    assert len(told) == 3
    assert "ZeroDivisionError('mine')" in str(told[0].message)
    assert "activation/enter/mean" in found[2]
    assert not any(key.endswith(("bad", "worse", "late")) for key in found[2])


def test_where_warnings_are_errors_training_continues(model: Network, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = ModuleMonitor()
    monitor.set_module(model)
    monitor.add_activation_metric("bad", lambda x: 1 / 0)
    train(model, monitor, steps=1)  # warnings are errors in these tests
    assert "activation/enter/bad failed and is skipped" in capsys.readouterr().err


class TestReference:
    def test_differences_from_initialisation(self, model: Network) -> None:
        reference = copy.deepcopy(model)
        monitor = ModuleMonitor()
        monitor.set_module(model)
        monitor.set_reference_module(reference)
        monitor.add_parameter_difference_metric("l2", lambda p, r: (p - r).norm())
        monitor.add_activation_difference_metric("l2", lambda a, r: (a - r).norm())
        monitor.add_gradient_difference_metric("l2", lambda g, r: (g - r).norm())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for step in range(2):
            x, y = batch()
            monitor.begin_step(step)
            F.cross_entropy(reference(x), y).backward()
            F.cross_entropy(model(x), y).backward()
            monitor.monitor_parameters()
            monitor.monitor_gradients()
            optimizer.step()
            optimizer.zero_grad()
            reference.zero_grad()
            monitor.end_step()
            found.append(monitor.get_step_metrics())
        kinds = (
            "activation_difference/enter/l2",
            "parameter_difference/enter.weight/l2",
            "gradient_difference/enter.weight/l2",
        )
        assert [found[0][kind] for kind in kinds] == [0.0, 0.0, 0.0]
        assert all(found[1][kind] > 0 for kind in kinds)

    def test_a_reference_that_has_not_run_is_reported_once(self, model: Network) -> None:
        monitor = ModuleMonitor()
        monitor.set_module(model)
        monitor.set_reference_module(copy.deepcopy(model))
        monitor.add_activation_difference_metric("l2", lambda a, r: (a - r).norm())
        monitor.begin_step(0)
        with pytest.warns(UserWarning, match="the reference has not run") as told:
            model(batch()[0])
        assert len(told) == 1
        monitor.end_step()
        assert not any(key.startswith("activation_difference") for key in monitor.get_step_metrics())

    def test_a_reference_can_be_removed_and_replaced(self, model: Network) -> None:
        monitor = ModuleMonitor()
        monitor.set_module(model)
        assert not monitor.has_reference_module()
        reference = copy.deepcopy(model)
        gone = weakref.ref(reference)
        monitor.set_reference_module(reference)
        assert monitor.has_reference_module()
        monitor.set_reference_module(copy.deepcopy(model))
        del reference
        gc.collect()
        assert gone() is None
        monitor.add_parameter_difference_metric("l2", lambda p, r: (p - r).norm())
        monitor.add_activation_difference_metric("l2", lambda a, r: (a - r).norm())
        monitor.remove_reference_module()
        monitor.remove_reference_module()
        assert not monitor.has_reference_module()
        (found,) = train(model, monitor, steps=1)
        assert not any("difference" in key for key in found)

    def test_another_structure_is_refused(self, model: Network) -> None:
        monitor = ModuleMonitor()
        with pytest.raises(UsageError, match="set_module"):
            monitor.set_reference_module(model)
        monitor.set_module(model)
        with pytest.raises(UsageError, match="the model itself"):
            monitor.set_reference_module(model)
        with pytest.raises(UsageError, match="only one of the two has "):
            monitor.set_reference_module(nn.Linear(2, 2))
        other = copy.deepcopy(model)
        other.head = nn.Linear(8, 3)
        with pytest.raises(UsageError, match=r"head.weight is \(2, 8\) in the model, \(3, 8\) in the reference"):
            monitor.set_reference_module(other)


def test_wrong_arguments_are_reported() -> None:
    monitor = ModuleMonitor()
    with pytest.raises(NotAModelError):
        monitor.set_module("model")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="must be a function"):
        monitor.add_activation_metric("x", 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="regex"):
        monitor.add_activation_metric("x", rms, "(")


def test_gradients_before_clipping_have_separate_names(model: Network) -> None:
    monitor = watched(model)
    x, y = batch()
    monitor.begin_step(0)
    F.cross_entropy(model(x), y).backward()
    monitor.monitor_gradients(before_clip=True)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    monitor.monitor_gradients()
    monitor.end_step()
    found = monitor.get_step_metrics()
    assert found["gradient_before_clip/head.weight/norm"] > 10 * found["gradient/head.weight/norm"] > 0


def test_hdf5_is_read_back_as_it_was(model: Network, tmp_path: Path) -> None:
    monitor = watched(model)
    train(model, monitor)
    monitor.begin_step(3)
    for key in ("loss", "loss/step", "loss/value", ".", "a/../b", "a//b", "50% · ünï", "x.y/z.w"):
        monitor.log_scalar(key, 1.5)
    monitor.log_scalar("nan", float("inf"))
    monitor.end_step()
    path = monitor.save_hdf5(tmp_path / "metrics.h5")
    assert ModuleMonitor.load_hdf5(path) == dict(monitor.get_all_metrics())


def test_metrics_become_part_of_a_run(model: Network, tmp_path: Path) -> None:
    with sonde.init(project="test", dir=tmp_path / "runs", verbose=False) as session:
        monitor = watched(model, session=session)
        found = train(model, monitor)
    run = sonde.open(session.path)
    table = run.scalars("activation/enter/mean")
    assert table["value"].to_pylist() == pytest.approx([f["activation/enter/mean"] for f in found])
    assert table["step"].to_pylist() == [0, 1, 2]


class TestAttention:
    def test_heads_have_separate_numbers(self, model: Network) -> None:
        monitor = ModuleMonitor()
        monitor.set_module(model)
        monitor.add_activation_metric("rms", rms, r".*head_\d+\..*")
        monitor.begin_step(0)
        model(batch()[0])
        monitor.end_step()
        found = monitor.get_step_metrics()
        for head in (0, 1):
            for part in ("query", "key", "value", "activation"):
                assert found[f"activation/attention.head_{head}.{part}/rms"] > 0
            assert 0 < found[f"attention_entropy/attention.head_{head}"] < torch.tensor(5.0).log()
            assert found[f"attention_max_logit/attention.head_{head}"] > 0

    def test_entropy_and_logits_are_those_of_the_formula(self) -> None:
        q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float32) for _ in range(3))
        logits = (q @ k.mT / 2).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
        p = logits.softmax(-1)
        entropy = -torch.xlogy(p, p).sum(-1).mean((0, 2))
        monitor = ModuleMonitor()
        monitor.set_module(nn.Linear(1, 1))
        monitor.begin_step(0)
        monitor_scaled_dot_product_attention(monitor, module="here", query=q, key=k, value=v, is_causal=True)
        monitor.end_step()
        found = monitor.get_step_metrics()
        for head in range(3):
            assert found[f"attention_entropy/here.head_{head}"] == pytest.approx(entropy[head].item(), rel=1e-4)
            largest = logits[:, head][logits[:, head].isfinite()].abs().max().item()
            assert found[f"attention_max_logit/here.head_{head}"] == pytest.approx(largest, rel=1e-5)

    def test_grouped_queries_and_masks(self) -> None:
        q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
        mask = torch.ones(5, 6, dtype=torch.bool)
        mask[:, 3:] = False
        monitor = ModuleMonitor()
        monitor.set_module(nn.Linear(1, 1))
        monitor.begin_step(0)
        monitor_scaled_dot_product_attention(
            monitor, module="here", query=q, key=k, value=v, attn_mask=mask, enable_gqa=True
        )
        monitor.end_step()
        found = monitor.get_step_metrics()
        assert len([key for key in found if key.startswith("attention_entropy/")]) == 4
        assert all(found[f"attention_entropy/here.head_{head}"] <= torch.tensor(3.0).log() for head in range(4))

    def test_a_wrong_shape_is_reported_and_training_continues(self) -> None:
        monitor = ModuleMonitor()
        monitor.set_module(nn.Linear(1, 1))
        monitor.begin_step(0)
        with pytest.warns(UserWarning, match="failed and is skipped"):
            monitor_scaled_dot_product_attention(
                monitor, module="here", query=torch.randn(3), key=torch.randn(3), value=torch.randn(3)
            )
