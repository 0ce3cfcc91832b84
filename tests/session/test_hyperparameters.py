"""Learning rate, weight decay, momentum, betas: those of every parameter group, at the step they were used in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import sonde
from sonde.read.series.summary import scalar_lines
from sonde.show.summary import scalar_series
from sonde.show.web.answers.overview import headline

STEPS = 6


class Net(nn.Module):
    """Two layers and a temperature of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))) * self.scale + self.shift


def in_groups(net: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(net.body.parameters()), "lr": 0.1},
        {"params": list(net.head.parameters()), "lr": 0.01, "weight_decay": 0.0},
        {"params": [net.scale, net.shift], "lr": 0.001, "betas": (0.8, 0.95), "eps": 1e-6},
    ]


def train(net: nn.Module, optimizer: Any, between: Callable[[int], object] = lambda step: None) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        between(step)


def numbers(run: Any, name: str) -> dict[int, float]:
    table = run.scalars(name)
    steps, values = table.column("step").to_pylist(), table.column("value").to_pylist()
    assert len(set(steps)) == len(steps), f"{name} has two values at one step"
    return dict(zip(steps, values, strict=True))


def test_the_learning_rate_of_every_group_is_recorded_at_every_step(begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(in_groups(net), weight_decay=0.3)
    scheduler = LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step, lambda step: 1 + step])
    used: list[list[float]] = []
    begin().watch(net, optimizer)
    for _ in range(STEPS):
        net(torch.randn(5, 4)).square().mean().backward()
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    run = reopen()
    for number, name in enumerate(("optim/lr", "optim/group1/lr", "optim/group2/lr")):
        assert numbers(run, name) == {step: rates[number] for step, rates in enumerate(used)}


def test_a_number_that_stays_is_recorded_once(begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(in_groups(net), weight_decay=0.3)
    begin().watch(net, optimizer)
    train(net, optimizer)
    run = reopen()
    expected = {
        "optim/weight_decay": 0.3,
        "optim/beta1": 0.9,
        "optim/beta2": 0.999,
        "optim/eps": 1e-8,
        "optim/group1/weight_decay": 0.0,
        "optim/group2/weight_decay": 0.3,
        "optim/group2/beta1": 0.8,
        "optim/group2/beta2": 0.95,
        "optim/group2/eps": 1e-6,
    }
    assert {name: numbers(run, name) for name in expected} == {name: {0: value} for name, value in expected.items()}


def test_a_change_is_recorded_with_the_last_step_before_it(begin: Any, reopen: Any) -> None:
    """So that a line through the points has its corner where the change was."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.3)

    def between(step: int) -> None:
        if step == 3:
            optimizer.param_groups[0]["weight_decay"] = 0.01

    begin().watch(net, optimizer)
    train(net, optimizer, between)
    assert numbers(reopen(), "optim/weight_decay") == {0: 0.3, 3: 0.3, 4: 0.01}


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_cycled_momentum_is_recorded(kind: str, begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer: Any = torch.optim.AdamW(net.parameters()) if kind == "adam" else None
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    used: list[float] = []

    def between(step: int) -> None:
        scheduler.step()

    begin().watch(net, optimizer)
    group = optimizer.param_groups[0]
    momentum = (lambda: group["betas"][0]) if kind == "adam" else (lambda: group["momentum"])
    for step in range(STEPS):
        net(torch.randn(5, 4)).square().mean().backward()
        used.append(momentum())
        optimizer.step()
        between(step)
    run = reopen()
    assert numbers(run, "optim/beta1" if kind == "adam" else "optim/momentum") == dict(enumerate(used))
    names = set(run.scalars("optim/*").column("name").to_pylist())
    assert not names & {"optim/initial_lr", "optim/max_lr", "optim/min_lr", "optim/base_momentum"}


def test_a_group_added_while_training_is_recorded_from_then_on(begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)

    def between(step: int) -> None:
        scheduler.step()
        if step == 2:
            optimizer.add_param_group({"params": list(net.body.parameters()), "lr": 0.02, "momentum": 0.5})
            scheduler.base_lrs.append(0.02)
            scheduler.lr_lambdas.append(lambda step: 1.0)

    begin().watch(net, optimizer)
    train(net, optimizer, between)
    run = reopen()
    assert numbers(run, "optim/group1/lr") == {3: 0.02, 4: 0.02, 5: 0.02}
    assert numbers(run, "optim/group1/momentum") == {3: 0.5}
    assert [group["lr"] for group in run.structure()["optimizers"][0]["groups"]] == [0.1, 0.02]  # as each of them began


def test_a_learning_rate_that_is_a_tensor_is_recorded_as_it_was(begin: Any, reopen: Any) -> None:
    net = Net()
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([{"params": net.body.parameters()}, {"params": net.head.parameters()}], lr=rate)
    begin().watch(net, optimizer)
    train(net, optimizer, lambda step: optimizer.param_groups[1]["lr"].mul_(0.5))
    run = reopen()
    shared = optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    halved = {step: pytest.approx(0.1 * 0.5**step) for step in range(STEPS)}
    assert numbers(run, "optim/group1/lr") == halved
    assert numbers(run, "optim/lr") == (halved if shared else dict.fromkeys(range(STEPS), pytest.approx(0.1)))


def test_groups_of_several_optimizers_are_told_apart(begin: Any, reopen: Any) -> None:
    net = Net()
    first = torch.optim.SGD(net.body.parameters(), lr=0.1)
    second = torch.optim.Adam([{"params": net.head.parameters(), "lr": 0.2}, {"params": [net.scale], "lr": 0.3}])
    begin().watch(net, [first, second])
    for _ in range(STEPS):
        net(torch.randn(5, 4)).square().mean().backward()
        first.step()
        second.step()
    run = reopen()
    rates = {"optim/lr": 0.1, "optim/1/lr": 0.2, "optim/1/group1/lr": 0.3}
    assert {name: numbers(run, name)[STEPS - 1] for name in rates} == rates


def test_two_watched_models_have_optimizers_of_different_names(begin: Any, reopen: Any) -> None:
    maker, critic = Net(), Net()
    first, second = torch.optim.SGD(maker.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.2)
    session = begin()
    session.watch(maker, first, prefix="maker.")
    session.watch(critic, second, prefix="critic.")
    for _ in range(STEPS):
        critic(torch.randn(5, 4)).square().mean().backward()
        second.step()
        maker(torch.randn(5, 4)).square().mean().backward()
        first.step()
    run = reopen()
    assert numbers(run, "optim/lr") == dict.fromkeys(range(STEPS), 0.1)
    assert numbers(run, "optim/1/lr") == dict.fromkeys(range(STEPS), 0.2)
    assert [optimizer["groups"][0]["lr"] for optimizer in run.structure()["optimizers"]] == [0.1, 0.2]


@pytest.mark.parametrize("is_named", [True, False])
def test_an_optimizer_of_two_watched_models_has_one_name(is_named: bool, begin: Any, reopen: Any) -> None:
    encoder, decoder = Net(), Net()
    params = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    session = begin()
    for model, prefix in ((encoder, "encoder."), (decoder, "decoder.")):
        session.watch(model, optimizer if is_named else None, prefix=prefix)
    for _ in range(STEPS):
        (encoder(torch.randn(5, 4)).square().mean() + decoder(torch.randn(5, 4)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
    run = reopen()
    own = [name for name in run.scalars("optim/*").column("name").to_pylist() if name.startswith("optim/1")]
    assert not own
    for name in ("lr", "grad_norm", "max_norm"):
        assert run.scalars(f"optim/{name}").column("step").to_pylist() == list(range(STEPS))
    assert [optimizer["number"] for optimizer in run.structure()["optimizers"]] == [0]
    assert {p["optimizer"] for p in run.structure()["parameters"]} == {0}


def test_models_that_had_an_optimizer_in_common_and_get_one_each_have_two_names(begin: Any, reopen: Any) -> None:
    encoder, decoder = Net(), Net()
    session = begin()
    session.watch(encoder, prefix="encoder.")
    session.watch(decoder, prefix="decoder.")

    def made(*optimizers: torch.optim.Optimizer) -> None:
        for _ in range(STEPS):
            (encoder(torch.randn(5, 4)).square().mean() + decoder(torch.randn(5, 4)).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()

    made(torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1))
    made(torch.optim.SGD(encoder.parameters(), lr=0.2), torch.optim.SGD(decoder.parameters(), lr=0.3))
    run = reopen()
    assert list(numbers(run, "optim/lr").values()) == [0.1] * STEPS + [0.2] * STEPS
    assert numbers(run, "optim/1/lr") == dict.fromkeys(range(STEPS, 2 * STEPS), 0.3)


def test_other_steps_record_the_first_groups_learning_rate_only(begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(in_groups(net))
    begin().watch(net, optimizer, when=sonde.every(3), activations=False)
    train(net, optimizer)
    run = reopen()
    assert list(numbers(run, "optim/lr")) == list(range(STEPS))
    assert list(numbers(run, "optim/group1/lr")) == [0, 3]


@pytest.mark.parametrize("name", ["Adam", "NAdam", "ASGD", "Rprop", "RMSprop", "Adagrad", "SGD", "Adadelta", "Adamax"])
def test_optimizer_state_of_one_element_is_recorded_and_counters_are_not(name: str, begin: Any, reopen: Any) -> None:
    net = Net()
    options: dict[str, Any] = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)
    begin().watch(net, optimizer)
    train(net, optimizer)
    run = reopen()
    found = set(run.stats("optim/*/mean").column("site").to_pylist())
    states = {
        f"{site}.{key}"
        for site, parameter in net.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and key not in ("step", "eta", "mu", "mu_product")
    }
    assert found == states
    for site in ("scale", "shift"):
        for key in [key for key in optimizer.state[getattr(net, site)] if f"{site}.{key}" in states]:
            last = run.stats(f"optim/{site}.{key}/mean").column("value").to_pylist()[-1]
            assert last == pytest.approx(optimizer.state[getattr(net, site)][key].item())


def test_the_structure_has_every_number_of_every_group(begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer = torch.optim.RMSprop(
        [{"params": net.body.parameters(), "alpha": 0.7}, {"params": net.head.parameters()}]
    )
    begin().watch(net, optimizer)
    train(net, optimizer)
    groups = reopen().structure()["optimizers"][0]["groups"]
    assert [group["alpha"] for group in groups] == [0.7, 0.99]
    assert [group["num_params"] for group in groups] == [2, 2]


def test_the_second_moment_is_corrected_by_the_betas_and_steps_of_its_group(begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer = torch.optim.Adam([{"params": net.body.parameters()}, {"params": [net.scale], "betas": (0.9, 0.7)}])
    lags: dict[str, list[float]] = {"body.weight": [], "scale": [], "head.weight": []}

    def between(step: int) -> None:
        for name, found in lags.items():
            parameter = net.get_parameter(name)
            if parameter in optimizer.state:
                state, grad = optimizer.state[parameter], parameter.grad.double()
                beta2 = 0.7 if name == "scale" else 0.999
                corrected = state["exp_avg_sq"].double() / (1 - beta2 ** state["step"].item())
                found.append((grad.square() / corrected.clamp(min=1e-16)).mean().item())
        if step == 2:
            optimizer.add_param_group({"params": net.head.parameters()})

    begin().watch(net, optimizer)
    train(net, optimizer, between)
    run = reopen()
    for name, expected in lags.items():
        found = run.stats(f"update/{name}/second_moment_lag").column("value").to_pylist()
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_numbers_on_a_device_are_recorded_without_waiting_for_it(name: str, begin: Any, reopen: Any) -> None:
    net = Net().cuda()
    rate = torch.tensor(0.1, device="cuda")
    groups = [{"params": net.body.parameters()}, {"params": net.head.parameters(), "lr": rate.clone(), "eps": 1e-5}]
    kind: Any = getattr(torch.optim, name)
    optimizer = kind(groups, lr=rate, capturable=True)
    begin().watch(net, optimizer, activations=False, inspect=False)
    inputs = torch.randn(5, 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(STEPS):
            net(inputs).square().mean().backward()
            optimizer.step()
            optimizer.param_groups[1]["lr"].mul_(0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run = reopen()
    assert numbers(run, "optim/group1/lr") == {step: pytest.approx(0.1 * 0.5**step) for step in range(STEPS)}
    assert numbers(run, "optim/group1/eps") == {0: 1e-5}
    assert run.stats("update/head.weight/second_moment_lag").num_rows == STEPS


def test_views_list_learning_rates_and_what_changes_but_no_constants(begin: Any, reopen: Any) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(in_groups(net))

    def between(step: int) -> None:
        optimizer.param_groups[2]["weight_decay"] = 0.1 * step

    begin().watch(net, optimizer)
    train(net, optimizer, between)
    run = reopen()
    shown = {series.name for series in scalar_series(run)} - {"data/loss/train"}  # seen by sonde: nothing was logged
    assert shown == {"optim/lr", "optim/group1/lr", "optim/group2/lr", "optim/group2/weight_decay"}
    assert {line.name for line in scalar_lines(run.scalars("optim/*"))} == shown
    assert headline(dict(enumerate(run.scalar_names)))["lr"] == run.scalar_names.index("optim/lr")
