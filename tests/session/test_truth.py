"""What is recorded equals what one computes by hand: accumulated, unscaled, before and after clipping."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sonde
from awkward import Awkward, Block, make_optimizer
from sonde.errors import UsageError
from sonde.reduce.numpy import sketch
from sonde.session.model import watched as watching


def values(run: Any, series: str) -> list[float]:
    table = run.stats(series)
    assert table.num_rows, f"no rows for {series}"
    return table.column("value").to_pylist()


def norms(model: nn.Module) -> dict[str, float]:
    return {n: p.grad.double().norm().item() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("optimizer_kind", ["sgd", "adamw-foreach", "adamw-fused"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", ["norm", "value", "none"])
def test_gradient_norms_equal_those_by_hand(
    optimizer_kind: str, scaled: bool, clip: str, begin: Any, reopen: Any
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = make_optimizer(optimizer_kind, model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
    begin().watch(model, optimizer)
    before: list[dict[str, float]] = []
    after: list[dict[str, float]] = []
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(3):
            x = torch.randn(7, 6)
            scaler.scale(model(x).square().mean() * 10).backward()
        if clip == "none":
            by = scaler.get_scale() if scaled else 1.0
            before.append({name: norm / by for name, norm in norms(model).items()})
            after.append(before[-1])
        else:
            scaler.unscale_(optimizer)
            before.append(norms(model))
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            after.append(norms(model))
        scaler.step(optimizer)
        scaler.update()
    run = reopen()
    for name in before[0]:
        assert values(run, f"grad/{name}/norm") == pytest.approx([row[name] for row in after], rel=1e-6)
        assert values(run, f"grad/{name}/norm_preclip") == pytest.approx([row[name] for row in before], rel=2e-6)
    if clip != "none":
        assert any(row["0.weight"] > other["0.weight"] * 1.01 for row, other in zip(before, after, strict=True))


def test_updates_are_what_happened_to_the_weights(begin: Any, reopen: Any) -> None:
    torch.manual_seed(2)
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    begin().watch(model, optimizer)
    before_norm, update_rms, weights = [], [], []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(0, 11, (3, 5)))["logits"].square().mean().backward()
        before = model.head.weight.detach().double().clone()
        optimizer.step()
        update = model.head.weight.detach().double() - before
        before_norm.append(before.norm().item())
        update_rms.append(update.square().mean().sqrt().item())
        weights.append(update.norm().item() / before.norm().item())
    run = reopen()
    assert values(run, "update/embed.weight/rms") == pytest.approx(update_rms, rel=1e-5)
    assert values(run, "param/embed.weight/norm") == pytest.approx(before_norm, rel=1e-6)
    assert values(run, "update/embed.weight/ratio") == pytest.approx(weights, rel=1e-5)


def test_paired_sums_and_optimizer_state_equal_those_by_hand(begin: Any, reopen: Any) -> None:
    torch.manual_seed(3)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    begin().watch(model, optimizer)
    cosines, lags, moments = [], [], []
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.randn(5, 40)).square().mean().backward()
        before = model.weight.detach().double().clone()
        optimizer.step()
        grad = model.weight.grad.double()
        update = model.weight.detach().double() - before
        state = optimizer.state[model.weight]
        corrected = state["exp_avg_sq"].double() / (1 - 0.95**step)
        cosines.append((torch.sum(grad * update) / grad.norm() / update.norm()).item())
        lags.append((grad.square() / corrected.clamp(min=1e-16)).mean().item())
        moments.append(state["exp_avg"].double().norm().item())
    run = reopen()
    assert values(run, "update/weight/grad_cosine") == pytest.approx(cosines, rel=1e-4)
    assert values(run, "update/weight/second_moment_lag") == pytest.approx(lags, rel=1e-4)
    assert values(run, "optim/weight.exp_avg/norm") == pytest.approx(moments, rel=1e-6)


def test_activations_and_their_gradients_equal_those_by_hand(begin: Any, reopen: Any) -> None:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer, activations=True, activation_grads=True)
    zero, hidden, gradient = [], [], []
    for _ in range(3):
        optimizer.zero_grad()
        outputs = []
        for _ in range(2):  # two micro-batches are one step
            x = torch.randn(4, 5)
            h = torch.relu(nn.functional.linear(x, model[0].weight.detach(), model[0].bias.detach()))
            h.requires_grad_()
            nn.functional.linear(h, model[2].weight.detach(), model[2].bias.detach()).square().mean().backward()
            outputs.append((h.detach(), h.grad))
            model(x).square().mean().backward()
        optimizer.step()
        both = torch.cat([h for h, _ in outputs])
        zero.append((both == 0).double().mean().item())
        hidden.append(both.double().norm().item())
        gradient.append(torch.cat([g for _, g in outputs]).double().norm().item())
    run = reopen()
    assert values(run, "act/1/zero_fraction") == pytest.approx(zero)
    assert values(run, "act/1/norm") == pytest.approx(hidden, rel=1e-6)
    assert values(run, "actgrad/1/norm") == pytest.approx(gradient, rel=1e-5)


def test_a_module_called_twice_is_merged(begin: Any, reopen: Any) -> None:
    torch.manual_seed(5)
    block = Block(8)
    model = nn.Sequential(block, block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    handle = block.register_forward_hook(lambda m, a, out: seen.append(out.detach().clone()))
    begin().watch(model, optimizer, activations=True)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    handle.remove()
    expected = sketch(torch.cat(seen).numpy())
    run = reopen()
    assert values(run, "act/0/n") == [expected.n]
    assert values(run, "act/0/rms") == pytest.approx([expected.rms], rel=1e-6)


@pytest.mark.parametrize("finite", [False, True])
def test_a_model_whose_parts_are_called_by_themselves_steps_as_any(finite: bool, begin: Any, reopen: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin(check_finite=finite)
    session.watch(model, optimizer, activations=sonde.every(3), inspect=False)
    for step in range(9):
        loss = model[1](model[0](torch.randn(5, 3))).square().mean()
        assert session.step_number == step
        session.log({"loss": loss})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run = reopen()
    assert run.stats("act/1/mean").column("step").to_pylist() == [0, 3, 6]
    assert run.stats("grad/0.weight/norm").column("step").to_pylist() == list(range(9))
    assert run.scalars("loss").column("step").to_pylist() == list(range(9))


def test_evaluation_between_steps_is_not_recorded(begin: Any, reopen: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(100, 4))
        model.eval()
        with torch.inference_mode():
            model(torch.randn(100, 4))
        model.train()
        session.log({"val": float(step)})
    run = reopen()
    assert values(run, "act/0/n") == [8.0, 8.0, 8.0]
    assert run.scalars("val").column("step").to_pylist() == [0, 1, 2]


def test_lbfgs_gradients_are_read_after_its_closure(begin: Any, reopen: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    begin().watch(model, optimizer)
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(closure)
    run = reopen()
    assert len(values(run, "grad/weight/norm")) == 3
    assert all(np.isfinite(values(run, "update/weight/norm")))


def test_two_optimizers_make_one_step(begin: Any, reopen: Any) -> None:
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("g", "d")}
    session = begin().watch(model, optimizers)
    for step in range(4):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
            model["d"](model["g"](torch.randn(2, 3))).sum().backward()
            optimizer.step()
        session.log({"loss": float(step)})
    run = reopen()
    assert run.last_step == 3
    assert run.stats("grad/g.weight/norm").column("step").to_pylist() == [0, 1, 2, 3]
    assert run.stats("update/d.weight/norm").column("step").to_pylist() == [0, 1, 2, 3]
    assert run.scalars("loss").column("step").to_pylist() == [0, 1, 2, 3]


def test_two_watched_models_make_one_step_together(begin: Any, reopen: Any) -> None:
    models = [nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 1))]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    session = begin()
    for model, optimizer, prefix in zip(models, optimizers, ("g.", "d."), strict=True):
        session.watch(model, optimizer, prefix=prefix)
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
            models[1](models[0](torch.randn(2, 3))).sum().backward()
            optimizer.step()
        session.log({"loss": float(step)})
    run = reopen()
    assert run.last_step == 4
    assert run.stats("grad/g.0.weight/n").column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert run.stats("grad/d.0.weight/n").column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert run.scalars("loss").column("step").to_pylist() == [0, 1, 2, 3, 4]


def test_two_models_of_the_same_names_must_be_told_apart(begin: Any) -> None:
    """Their statistics would be merged, and be those of neither."""
    first, second = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 1))
    session = begin().watch(first)
    with pytest.raises(UsageError, match=r'another watched model also has "0\.bias".*prefix='):
        session.watch(second)
    session.watch(second, prefix="critic.")


def test_a_model_in_another_wrapper_is_recorded_once(begin: Any, reopen: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer).watch(nn.DataParallel(model), optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert reopen().stats("grad/weight/n").column("value").to_pylist() == [3.0]


def test_a_model_trained_after_another_continues_under_its_names(begin: Any, reopen: Any) -> None:
    session, models = begin(), [nn.Linear(3, 1), nn.Linear(3, 1)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.watch(model, optimizer)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert reopen().stats("grad/weight/n").column("value").to_pylist() == [3.0] * 4


def test_an_optimizer_that_stops_stepping_does_not_stop_the_others(begin: Any, reopen: Any) -> None:
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("g", "d")}
    begin().watch(model, optimizers)
    for step in range(12):
        model["d"](model["g"](torch.randn(2, 3))).sum().backward()
        for name, optimizer in optimizers.items():
            if name == "g" or step < 3:
                optimizer.step()
    run = reopen()
    assert run.last_step == 11
    assert run.stats("grad/g.weight/n").column("step").to_pylist() == list(range(12))


def test_a_step_that_fails_is_not_merged_with_the_next(begin: Any, reopen: Any) -> None:
    class Failing(torch.optim.SGD):
        is_failing = False

        def step(self, closure: Any = None) -> Any:
            if self.is_failing:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = nn.Linear(2, 1)
    optimizer = Failing(model.parameters(), lr=0.0)
    begin().watch(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * (step + 1)).backward()
        optimizer.is_failing = step in (1, 2)
        with contextlib.suppress(RuntimeError):
            optimizer.step()
    run = reopen()
    assert values(run, "grad/bias/norm") == [1.0, 4.0]
    assert values(run, "param/weight/n") == [2.0, 2.0]
    assert values(run, "update/weight/n") == [2.0, 2.0]


def three_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every gradient is one in each."""
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def test_an_optimizer_that_calls_the_step_of_its_parent_is_measured_once(begin: Any, reopen: Any) -> None:
    class Shrinking(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            with torch.no_grad():
                model.bias.sub_(0.5)

    model = nn.Linear(2, 1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from now on torch calls its hooks in the parent's step as well
    optimizer = Shrinking(model.parameters(), lr=0.5)
    begin().watch(model, optimizer)
    three_steps(model, optimizer)
    run = reopen()
    assert values(run, "grad/bias/norm") == [1.0, 1.0, 1.0]
    assert values(run, "update/bias/norm") == pytest.approx([1.0, 1.0, 1.0])
    assert values(run, "param/weight/n") == values(run, "update/weight/n") == [2.0, 2.0, 2.0]


class Wrapping(torch.optim.Optimizer):
    """As SAM and Lookahead do: an optimizer around another, over the same parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        self.inner = torch.optim.SGD(self.param_groups, lr=0.5)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


@pytest.mark.parametrize("is_named", [False, True])
def test_an_optimizer_around_another_is_measured_once(is_named: bool, begin: Any, reopen: Any, capfd: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = Wrapping(model.parameters())
    begin().watch(model, optimizer if is_named else None)
    three_steps(model, optimizer)
    run = reopen()
    assert values(run, "grad/bias/norm") == [1.0, 1.0, 1.0]
    assert values(run, "param/weight/n") == values(run, "update/weight/n") == [2.0, 2.0, 2.0]
    assert "not passed to watch()" not in capfd.readouterr().err


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_second_optimizer_is_followed_or_warned_about(is_kept: bool, begin: Any, reopen: Any, capfd: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = [optimizer] if is_kept else []
    begin().watch(model, optimizer)
    for step in range(4):
        if step == 2:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # another stage of the training
            gc.collect()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    told = capfd.readouterr().err
    assert reopen().stats("grad/bias/norm").column("step").to_pylist() == ([0, 1] if is_kept else [0, 1, 2, 3])
    assert told.count("SGD updates parameters of this model but was not passed to watch()") == len(kept)


def test_a_tapped_tensor_that_cannot_be_read_is_reported(begin: Any, capfd: Any) -> None:
    session = begin()
    for _ in range(2):
        session.tap("ghost", torch.empty(3, device="meta"))
    assert capfd.readouterr().err.count('"ghost" is not recorded') == 1


@pytest.mark.parametrize("where", ["before the step", "after the step"])
def test_a_logged_loss_belongs_to_its_own_step(where: str, begin: Any, reopen: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).sum() * 0 + step
        loss.backward()
        if where == "before the step":
            session.log({"loss": loss})
        optimizer.step()
        if where == "after the step":
            session.log({"loss": loss})
    table = reopen().scalars("loss")
    assert table.column("value").to_pylist() == table.column("step").to_pylist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_the_scaler_skips_counts_and_is_an_event(begin: Any, reopen: Any, fused: bool) -> None:
    """A fused optimizer is called and does nothing; any other is not called, and no hook of it tells."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    session = begin().watch(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum() * (float("inf") if step == 1 else step + 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        session.log({"mine": step})
    run = reopen()
    assert [e["step"] for e in run.events().to_pylist() if e["type"] == "skipped_step"] == [1]
    assert run.scalars("mine").column("step").to_pylist() == [0, 1, 2, 3]
    assert values(run, "grad/bias/norm")[::2] + values(run, "grad/bias/norm")[3:] == [1.0, 3.0, 4.0]
    assert values(run, "grad/bias/inf") == [0, 1, 0, 0]
    assert [value > 0 for value in values(run, "update/weight/norm")] == [True, False, True, True]
    assert run.scalars("optim/loss_scale").column("value").to_pylist() == [4.0, 4.0, 2.0, 2.0]


def test_of_two_optimizers_one_may_be_kept_from_its_step(begin: Any, reopen: Any) -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    begin().watch(model, optimizers)
    for step in range(4):
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            factor = float("inf") if (number, step) == (1, 2) else 1.0
            scaler.scale(model[number](torch.ones(1, 2)).sum() * factor).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    run = reopen()
    assert [e["step"] for e in run.events().to_pylist() if e["type"] == "skipped_step"] == [2]
    assert values(run, "update/0.bias/norm") == pytest.approx([0.1] * 4)
    assert values(run, "update/1.bias/norm") == pytest.approx([0.1, 0.1, 0.0, 0.1])
    assert run.scalars("optim/1/loss_scale").column("value").to_pylist() == [4.0, 4.0, 4.0, 2.0]


def test_calls_without_end_are_left_out_until_the_next_step(
    begin: Any, reopen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is called on and on is called as if for one huge step: nothing may pile up for it."""
    monkeypatch.setattr(watching, "MAX_ONES", 10)
    monkeypatch.setattr(watching, "MAX_SAMPLED", 6)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin(hist_every=1).watch(model, optimizer)
    for num_calls in (3, 25, 4):
        sum(model(torch.ones(1, 2)).sum() for _ in range(num_calls)).backward()
        optimizer.step()
    assert session.recording.breaker.num_errors == 0
    run = reopen()
    assert values(run, "act/*/n") == [3, 10, 4]
    assert values(run, "grad/bias/n") == [1, 1, 1]
    (told,) = [e["message"] for e in run.events().to_pylist() if "no_grad" in e["message"]]
    assert told.startswith("10 activations")


def test_a_loop_without_torch_optimizers_steps_by_hand(begin: Any, reopen: Any) -> None:
    model = nn.Linear(2, 1)
    session = begin().watch(model)
    for step in range(3):
        model.zero_grad()
        (model(torch.ones(1, 2)).sum() * (step + 1)).backward()
        session.log({"loss": step})
        session.step()
    run = reopen()
    assert values(run, "grad/bias/norm") == [1.0, 2.0, 3.0]
    assert run.scalars("loss").column("step").to_pylist() == [0, 1, 2]


def test_calling_step_next_to_a_watched_optimizer_counts_once(begin: Any, reopen: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = begin().watch(model, optimizer)
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        session.log({"loss": 1.0})
        session.step()
    run = reopen()
    assert run.last_step == 3
    assert run.scalars("loss").column("step").to_pylist() == [0, 1, 2, 3]


def test_coverage_names_what_never_fired(begin: Any, reopen: Any) -> None:
    model = Awkward()
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "second" not in n], lr=0.1)
    begin().watch(model, optimizer)
    for _ in range(2):
        model(torch.randint(0, 11, (2, 3)))["logits"].sum().backward()
        optimizer.step()
    coverage = reopen().coverage()
    assert coverage["modules_never_seen"] == ["unused"]
    assert coverage["parameters_without_gradient"] == ["unused.bias", "unused.weight"]
    assert "second.up.weight" in coverage["parameters_not_in_optimizer"]
    assert "first.up.weight" not in coverage["parameters_not_in_optimizer"]


def test_coverage_does_not_blame_what_was_not_asked_for(begin: Any, reopen: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer, sites="1.*", grads=False)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    coverage = reopen().coverage()
    assert coverage["parameters_not_in_optimizer"] == []
    assert coverage["parameters_without_gradient"] == []


def test_tap_and_batch_are_separate_sketches(begin: Any, reopen: Any) -> None:
    session = begin()
    session.batch(torch.tensor([3.0, 4.0]), np.array([1, 2, 2]))
    session.tap("logits/last", torch.tensor([[0.0, float("nan")]]))
    run = reopen()
    assert values(run, "custom/batch.0/norm") == [5.0]
    assert values(run, "custom/batch.1/norm") == [3.0]
    assert values(run, "custom/logits%2Flast/nan") == [1.0]


def test_schedules_choose_the_steps(begin: Any, reopen: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(
        model, optimizer, params=sonde.every(4), grads=True, updates=False, activations=sonde.first(2) | sonde.every(5)
    )
    for _ in range(11):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    run = reopen()
    steps = {kind: run.stats(f"{kind}/*/n").column("step").unique().to_pylist() for kind in ("param", "grad", "act")}
    assert steps == {"param": [0, 4, 8], "grad": list(range(11)), "act": [0, 1, 5, 10]}
    assert run.stats("update/*/n").num_rows == 0


def test_sites_are_selected_by_glob_type_and_function(begin: Any, reopen: Any) -> None:
    model = Awkward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer, sites=["second.*", "!*.bias", nn.Embedding], activations=True)
    model(torch.randint(0, 11, (2, 3)))["logits"].sum().backward()
    optimizer.step()
    sites = reopen().sites().to_pylist()
    grads = {s["site"] for s in sites if s["kind"] == "grad"}
    acts = {s["site"] for s in sites if s["kind"] == "act"}
    assert grads == {"embed.weight", "second.norm.weight", "second.up.weight", "second.down.weight"}
    assert acts == {"embed", "second.norm", "second.up", "second.relu", "second.drop", "second.down"}


@pytest.mark.parametrize(
    ("sites", "is_wanted"), [("0*", False), (["2*"], True), ([nn.Linear], True), ([nn.ReLU], False)]
)
def test_what_a_model_gains_later_is_selected_likewise(sites: Any, is_wanted: bool, begin: Any, reopen: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begin().watch(model, optimizer, sites=sites, when=sonde.every(1), inspect=False)
    for step in range(4):
        if step == 1:
            model.append(nn.Linear(2, 2))
            optimizer.add_param_group({"params": model[2].parameters()})
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    run = reopen()
    seen = {(row["kind"], row["site"]) for row in run.stats("*/*/n").to_pylist()}
    assert (("act", "2") in seen, ("grad", "2.weight") in seen) == (is_wanted, is_wanted)


def test_some_rows_of_activations_are_marked_as_such(begin: Any, reopen: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    begin(activation_rows=16).watch(model, optimizer, activations=sonde.every(1), activation_grads=sonde.every(1))
    whole = []
    for _ in range(40):
        out = model(torch.randn(10, 32, 4))
        whole.append(out.detach().double().square().mean().sqrt().item())
        out.square().sum().backward()
        optimizer.step()
    run = reopen()
    assert set(values(run, "act/*/n")) == set(values(run, "actgrad/*/n")) == {16 * 8}
    assert run.manifest.facts["watching"]["activation_rows"] == 16
    read = values(run, "act/*/rms")
    assert np.mean(read) == pytest.approx(np.mean(whole), rel=0.05)
    assert len({round(value, 9) for value in read}) == 40
    assert set(values(run, "grad/weight/n")) == {32}, "only activations are sampled"
