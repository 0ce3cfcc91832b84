"""Steps of several optimizers, of optimizers of every kind, and of such as come and go: each is counted once.

Each value that a loop logs is the number of the step it belongs to: what was recorded is right where the two are equal.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from numbered import STEPS, batch, check_count, check_steps, net, rows_seen, sgd


def test_a_closure_is_part_of_its_step_and_a_forward_pass_before_it_is_not(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    session = begin().watch(model, optimizer, activations=True)
    num_rows: list[int] = []
    x = batch(2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        session.log({"loss": step})
        num_rows[-1] += len(x)
        loss.backward()
        return loss

    look: Any = None
    for step in range(STEPS):
        num_rows.append(0)
        optimizer.step(closure)
        look = model(batch(5))
        session.log({"accuracy": step})
    del look
    run = reopen()
    table = run.scalars("loss")
    assert table["step"].to_pylist() == table["value"].to_pylist()
    check_steps(run, "accuracy")
    check_count(run)
    assert rows_seen(run) == num_rows


@pytest.mark.parametrize("is_backward_inside", [True, False])
def test_passes_before_a_closure_that_makes_none_are_of_its_step(
    is_backward_inside: bool, begin: Any, reopen: Any
) -> None:
    """Lightning passes a closure that does nothing where the user calls `backward`. Here gradients come back through
    the second part of the model and not through the first."""
    model = nn.ModuleDict({"maker": nn.Linear(3, 3), "critic": nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model["critic"].parameters(), lr=0.1)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        made = model["maker"](torch.randn(2, 3))
        loss = model["critic"](made.detach()).square().mean()
        session.log({"loss": step})
        if is_backward_inside:
            optimizer.step(lambda loss=loss: (loss.backward(), loss)[1])
        else:
            loss.backward()
            optimizer.step(lambda: None)
        session.log({"after": step})
        del made
    run = reopen()
    check_steps(run, "loss", "after")
    check_count(run, site="critic.bias")
    for site, width in (("maker", 3), ("critic", 1)):
        table = run.stats(f"act/{site}/n")
        assert dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True)) == dict.fromkeys(
            range(STEPS), 2 * width
        )


@pytest.mark.parametrize("is_looking", [False, True])
def test_a_step_that_the_scaler_skips_is_a_step(is_looking: bool, begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    session = begin().watch(model, optimizer, activations=True)
    look: Any = None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(2)).square().mean()
        session.log({"loss": step})
        scaler.scale(loss * (float("inf") if step in (0, 3) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if is_looking:
            look = model(batch(5))
        session.log({"after": step})
    del look
    run = reopen()
    check_steps(run, "loss", "after")
    assert run.last_step == STEPS - 1
    assert rows_seen(run) == [2] * STEPS
    assert [e["step"] for e in run.events().to_pylist() if e["type"] == "skipped_step"] == [0, 3]


@pytest.mark.parametrize("is_named", [False, True])
def test_models_that_are_trained_in_turn_make_one_step_together(is_named: bool, begin: Any, reopen: Any) -> None:
    """A GAN; where its optimizers are not named, the second is met only when the first has stepped."""
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})
    optimizers = {name: sgd(model[name]) for name in ("d", "g")}
    session = begin().watch(model, optimizers if is_named else None, activations=True)
    for step in range(STEPS):
        fake = model["g"](batch(2)).detach()
        d_loss = model["d"](fake).mean() - model["d"](batch(4)).mean()
        session.log({"d_loss": step})
        optimizers["d"].zero_grad()
        d_loss.backward()
        optimizers["d"].step()
        session.log({"d_after": step})
        g_loss = -model["d"](model["g"](batch(2))).mean()
        session.log({"g_loss": step})
        optimizers["g"].zero_grad()
        g_loss.backward()
        optimizers["g"].step()
        session.log({"g_after": step})
    run = reopen()
    check_steps(run, "d_loss", "d_after", "g_loss", "g_after")
    check_count(run, site="d.bias")
    check_count(run, site="g.bias")
    assert rows_seen(run, "d") == [8] * STEPS


@pytest.mark.parametrize("is_named", [False, True])
def test_a_critic_that_steps_more_often_makes_separate_steps(is_named: bool, begin: Any, reopen: Any) -> None:
    """The generator's step is that of the last of the critic's."""
    critic, generator = net(), nn.Linear(3, 3)
    optimizers = [sgd(critic), sgd(generator)]
    session = begin()
    for model, optimizer, prefix in zip((critic, generator), optimizers, ("c.", "g."), strict=True):
        session.watch(model, optimizer if is_named else None, prefix=prefix, activations=True)
    step = -1
    for _ in range(3):
        for _ in range(3):
            step += 1
            loss = critic(batch(2)).mean() - critic(generator(batch(2)).detach()).mean()
            session.log({"c_loss": step})
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            session.log({"c_after": step})
        loss = -critic(generator(batch(2))).mean()
        session.log({"g_loss": step})
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        session.log({"g_after": step})
    run = reopen()
    check_steps(run, "c_loss", "c_after", steps=9)
    # One that is not named and met so late could as well have been added just now: its first step is a separate step.
    wanted = [2 if is_named else 3, 5, 8]
    for name in ("g_loss", "g_after"):
        assert run.scalars(name)["step"].to_pylist() == wanted
    check_count(run, 9, "c.2.bias")
    assert run.stats("grad/g.bias/n")["step"].to_pylist() == wanted


def test_an_optimizer_for_each_parameter_inside_the_backward_pass(begin: Any, reopen: Any) -> None:
    """As in torch's tutorial: nothing is left to be done after `backward`."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    session = begin().watch(model, activations=True)
    wanted = []
    for step in range(12):
        loss = model(batch(2)).square().mean()
        session.log({"before": step})
        before = model[0].weight.detach().double().clone()
        loss.backward()
        wanted.append((model[0].weight.detach().double() - before).norm().item())
        session.log({"loss": step})
    run = reopen()
    check_steps(run, "before", "loss", steps=12)
    for name, _ in model.named_parameters():
        check_count(run, 12, name)
    assert rows_seen(run) == [2] * 12
    assert run.stats("update/0.weight/norm")["value"].to_pylist() == pytest.approx(wanted, rel=1e-5)


def test_the_optimizers_of_torch_distributed_inside_the_backward_pass(begin: Any, reopen: Any) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.01})
    session = begin().watch(model, activations=True)
    look: Any = None
    for step in range(STEPS):
        model(batch(2)).square().mean().backward()
        session.log({"loss": step})
        look = model(batch(5))
        session.log({"accuracy": step})
    del look
    run = reopen()
    check_steps(run, "loss", "accuracy")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS


def test_a_layer_without_gradient_does_not_move_the_steps_of_optimizers_inside_the_backward_pass(
    begin: Any, reopen: Any
) -> None:
    """Layers that are dropped at random: not every optimizer steps each time."""
    model = net()
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    session = begin().watch(model, activations=True, inspect=False)
    for step in range(STEPS):
        out = model(batch(2)) if step % 3 else model[2](torch.randn(2, 4))
        session.log({"before": step})
        out.square().mean().backward()
        session.log({"loss": step})
    run = reopen()
    check_steps(run, "before", "loss")
    check_count(run)
    assert run.stats("grad/0.bias/n")["step"].to_pylist() == [step for step in range(STEPS) if step % 3]


@pytest.mark.parametrize("is_first", [False, True])
def test_an_optimizer_that_is_added_later_steps_with_the_others(is_first: bool, begin: Any, reopen: Any) -> None:
    """Layers that are frozen at first, and then have a separate optimizer."""
    model = net()
    optimizers = [sgd(model[2])]
    session = begin().watch(model, activations=True)
    for step in range(STEPS):
        if step == 3:
            optimizers.insert(0 if is_first else 1, sgd(model[0]))
        model.zero_grad()
        loss = model(batch(2)).square().mean()
        session.log({"loss": step})
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        session.log({"after": step})
    run = reopen()
    check_steps(run, "loss", "after")
    check_count(run)
    assert run.stats("grad/0.bias/n")["step"].to_pylist() == [3, 4, 5]


@pytest.mark.parametrize("is_old_kept", [False, True])
def test_an_optimizer_that_takes_the_place_of_another_continues_the_count(
    is_old_kept: bool, begin: Any, reopen: Any
) -> None:
    model = net()
    optimizer = sgd(model)
    kept = [optimizer]
    session = begin().watch(model, activations=True)
    for step in range(STEPS):
        if step == 3:
            optimizer = torch.optim.Adam(model.parameters())
            if not is_old_kept:
                kept.clear()
                gc.collect()
        optimizer.zero_grad()
        loss = model(batch(2)).square().mean()
        session.log({"loss": step})
        loss.backward()
        optimizer.step()
        session.log({"after": step})
    run = reopen()
    check_steps(run, "loss", "after")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: a step up and a step down, with a pass before each."""

    def __init__(self, params: Any, base: torch.optim.Optimizer) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = base
        self.up: list[Tensor] = []

    @torch.no_grad()
    def first_step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.up = [p.grad * 0.05 for p in params]
        for p, up in zip(params, self.up, strict=True):
            p.add_(up)
            p.grad = None

    @torch.no_grad()
    def second_step(self) -> None:
        for p, up in zip([p for group in self.param_groups for p in group["params"]], self.up, strict=True):
            p.sub_(up)
        self.base.step()

    def step(self, closure: Any = None) -> None:
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@pytest.mark.parametrize("has_closure", [False, True])
def test_an_optimizer_of_two_passes_makes_one_step(has_closure: bool, begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = SAM(model.parameters(), sgd(model))
    session = begin().watch(model, optimizer if has_closure else optimizer.base, activations=True)
    look: Any = None
    for step in range(STEPS):
        x = batch(2)
        model(x).square().mean().backward()
        session.log({"loss": step})
        again = lambda x=x: model(x).square().mean().backward()
        if has_closure:
            optimizer.step(again)
        else:
            optimizer.first_step()
            again()
            optimizer.second_step()
        model.zero_grad()
        look = model(batch(5))
        session.log({"accuracy": step})
    del look
    run = reopen()
    check_steps(run, "loss", "accuracy")
    check_count(run)
    assert rows_seen(run) == [4] * STEPS


def test_a_step_that_raises_and_is_made_again_counts_once(begin: Any, reopen: Any) -> None:
    class Failing(torch.optim.SGD):
        is_failing = False

        def step(self, closure: Any = None) -> Any:
            if self.is_failing:
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = net()
    optimizer = Failing(model.parameters(), lr=0.01)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        for is_failing in (True, False) if step in (0, 3) else (False,):
            optimizer.is_failing = is_failing
            optimizer.zero_grad()
            loss = model(batch(2)).square().mean()
            session.log({"loss": step})
            loss.backward()
            try:
                optimizer.step()
            except RuntimeError:
                continue
        session.log({"after": step})
    run = reopen()
    assert run.scalars("loss")["step"].to_pylist() == run.scalars("loss")["value"].to_pylist()
    check_steps(run, "after")
    check_count(run)


@pytest.mark.parametrize("where", ["before the step", "after the step", "after a look"])
def test_a_model_watched_again_in_the_middle_continues_the_count(where: str, begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    session = begin().watch(model, optimizer, activations=True)
    look: Any = None
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(2)).square().mean()
        loss.backward()
        if step == 2 and where == "before the step":
            session.watch(model, optimizer, activations=True)
        optimizer.step()
        if step == 2 and where == "after the step":
            session.watch(model, optimizer, activations=True)
        look = model(batch(5))
        if step == 2 and where == "after a look":
            session.watch(model, optimizer, activations=True)
        session.log({"after": step})
    del look
    run = reopen()
    check_steps(run, "after")
    check_count(run)


def test_an_average_of_the_weights_is_not_a_step(begin: Any, reopen: Any) -> None:
    model = net()
    optimizer = sgd(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    session = begin().watch(model, optimizer, activations=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        average(batch(9))
        session.log({"after": step})
    run = reopen()
    check_steps(run, "after")
    check_count(run)
    assert rows_seen(run) == [2] * STEPS
