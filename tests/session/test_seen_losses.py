"""Losses that are not logged: what sonde sees of them is what the program itself would have printed, step by step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from sonde.schema.losses import SEEN_TRAINING, SEEN_VALIDATION

NUM_STEPS = 5
Losses = list[float]
GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(60, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
T = X.sum(dim=1, keepdim=True)
HELD_OUT = TensorDataset(X[40:], Y[40:])


def make(width: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, width))


def rows(num: int) -> Iterator[slice]:
    """Batches of four, five, six, …: no two neighbours of one size."""
    start = 0
    for size in (4 + n % 3 for n in range(num)):
        yield slice(start % 30, start % 30 + size)
        start += size


def seen(run: Any, name: str = SEEN_TRAINING) -> dict[int, float]:
    if name not in run.scalar_names:
        return {}
    table = run.scalars(name)
    return dict(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------ the training loss


def function(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        loss = F.cross_entropy(net(X[at]), Y[at])
        loss.backward()
        step(optimizer)
        yield loss.item()


def module(net: Any, optimizer: Any) -> Iterator[float]:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    for at in rows(NUM_STEPS):
        loss = criterion(net(X[at]), Y[at])
        loss.backward()
        step(optimizer)
        yield loss.item()


def by_hand(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        loss = (net(X[at]).mean(dim=1, keepdim=True) - T[at]).abs().sum() / (T[at] > 0).sum().clamp(min=1)
        loss.backward()
        step(optimizer)
        yield loss.item()


def penalty(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        loss = F.cross_entropy(net(X[at]), Y[at]) + 0.01 * sum(p.square().sum() for p in net.parameters())
        loss.backward()
        step(optimizer)
        yield loss.item()


def two_parts(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        output = net(X[at])
        first, second = F.cross_entropy(output, Y[at]), output.square().mean()
        first.backward(retain_graph=True)
        second.backward()
        step(optimizer)
        yield first.item() + second.item()


def two_roots(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        output = net(X[at])
        first, second = F.cross_entropy(output, Y[at]), output.square().mean()
        torch.autograd.backward([first, second])
        step(optimizer)
        yield first.item() + second.item()


def constant_factor(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        loss = 0.5 * F.cross_entropy(net(X[at]), Y[at])
        loss.backward()
        step(optimizer)
        yield loss.item()


def accumulated(divide: Callable[[Tensor, int], Tensor], loss_of: Any = None, nums: tuple[int, ...] = (4, 4, 4, 3, 4)):
    """Steps of four micro-batches; the fourth step, as the last of an epoch, of three."""

    def train(net: Any, optimizer: Any) -> Iterator[float]:
        batches = rows(99)
        for num in nums:
            losses = []
            for _ in range(num):
                at = next(batches)
                output = net(X[at])
                loss = F.cross_entropy(output, Y[at]) if loss_of is None else loss_of(output, at)
                losses.append(loss.item())
                divide(loss, 4).backward()
            step(optimizer)
            yield sum(losses) / len(losses)

    return train


def squared(output: Tensor, at: slice) -> Tensor:
    return (output.mean(dim=1, keepdim=True) - T[at]).square().sum() / len(T[at])


def by_samples(net: Any, optimizer: Any) -> Iterator[float]:
    """Micro-batches count by their size."""
    batches = rows(99)
    for _ in range(NUM_STEPS):
        micro = [next(batches) for _ in range(3)]
        total = sum(len(Y[at]) for at in micro)
        expected = 0.0
        for at in micro:
            loss = F.cross_entropy(net(X[at]), Y[at])
            (loss * (len(Y[at]) / total)).backward()
            expected += loss.item() * len(Y[at]) / total
        step(optimizer)
        yield expected


def by_terms(net: Any, optimizer: Any) -> Iterator[float]:
    """Sums over terms, divided by all terms of the step; some targets are ignored."""
    batches = rows(99)
    for _ in range(NUM_STEPS):
        micro = [next(batches) for _ in range(3)]
        labels = [Y[at].masked_fill(torch.arange(len(Y[at])) == 1, -100) for at in micro]
        total = sum((one != -100).sum() for one in labels)
        expected = 0.0
        for at, one in zip(micro, labels, strict=True):
            loss = F.cross_entropy(net(X[at]), one, reduction="sum") / total
            loss.backward()
            expected += loss.item()
        step(optimizer)
        yield expected


def scaled(num: int):
    def train(net: Any, optimizer: Any) -> Iterator[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        batches = rows(99)
        for _ in range(NUM_STEPS):
            losses = []
            for _ in range(num):
                at = next(batches)
                loss = F.cross_entropy(net(X[at]), Y[at])
                scaler.scale(loss / num).backward()
                losses.append(loss.item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield sum(losses) / num

    return train


def closure(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        losses: Losses = []

        def evaluate(at: slice = at, losses: Losses = losses) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(X[at]), Y[at])
            loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(evaluate)
        yield losses[0]


def line_search(net: Any, _: Any) -> Iterator[float]:
    yield from closure(net, torch.optim.LBFGS(net.parameters(), max_iter=4, line_search_fn="strong_wolfe"))


def checkpointed(is_reentrant: bool):
    def train(net: Any, optimizer: Any) -> Iterator[float]:
        for at in rows(NUM_STEPS):
            x = X[at].clone().requires_grad_()
            loss = F.cross_entropy(checkpoint(net, x, use_reentrant=is_reentrant), Y[at])
            loss.backward()
            step(optimizer)
            yield loss.item()

    return train


def autocast(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(X[at]), Y[at])
        loss.backward()
        step(optimizer)
        yield loss.item()


def gradient_penalty(net: Any, optimizer: Any) -> Iterator[float]:
    for at in rows(NUM_STEPS):
        x = X[at].clone().requires_grad_()
        output = net(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = F.cross_entropy(output, Y[at]) + slope.square().mean()
        loss.backward()
        step(optimizer)
        yield loss.item()


def measured_too(net: Any, optimizer: Any) -> Iterator[float]:
    """A metric that is a loss function is computed under no_grad, of the training's own output."""
    for at in rows(NUM_STEPS):
        output = net(X[at])
        loss = F.cross_entropy(output, Y[at])
        with torch.no_grad():
            F.cross_entropy(output, Y[at].flip(0))
        loss.backward()
        step(optimizer)
        yield loss.item()


def in_eval_mode(net: Any, optimizer: Any) -> Iterator[float]:
    net.eval()
    yield from function(net, optimizer)


PROGRAMS: dict[str, Any] = {
    "function": function,
    "module": module,
    "by hand": by_hand,
    "penalty": penalty,
    "two parts": two_parts,
    "two roots": two_roots,
    "constant factor": constant_factor,
    "divided": accumulated(lambda loss, num: loss / num),
    "multiplied": accumulated(lambda loss, num: loss * (1 / num)),
    "divided in place": accumulated(lambda loss, num: loss.div_(num)),
    "divided by a tensor": accumulated(lambda loss, num: loss / torch.tensor(float(num))),
    "not divided": accumulated(lambda loss, num: loss),
    "by hand, divided": accumulated(lambda loss, num: loss / num, squared),
    "by hand, not divided": accumulated(lambda loss, num: loss, squared),
    "by samples": by_samples,
    "by terms": by_terms,
    "scaled": scaled(1),
    "scaled and divided": scaled(3),
    "closure": closure,
    "line search": line_search,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "autocast": autocast,
    "gradient penalty": gradient_penalty,
    "measured too": measured_too,
    "in eval mode": in_eval_mode,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_training_loss_is_what_the_program_would_print(begin: Any, reopen: Any, program: str) -> None:
    net = make()
    begin().watch(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of checkpoints
        printed = list(PROGRAMS[program](net, torch.optim.SGD(net.parameters(), lr=0.1)))
    run = reopen()
    assert seen(run) == pytest.approx(dict(enumerate(printed)), rel=1e-6)
    assert seen(run, SEEN_VALIDATION) == {}
    assert run.warnings == []


def test_nothing_that_is_trained_changes(begin: Any, reopen: Any) -> None:
    trained = []
    for is_watched in (False, True):
        net = make()
        if is_watched:
            begin().watch(net)
        list(PROGRAMS["scaled and divided"](net, torch.optim.Adam(net.parameters())))
        with torch.inference_mode():
            F.cross_entropy(net(X), Y)
        trained.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_of_two_models_it_is_the_first_ones(begin: Any, reopen: Any) -> None:
    critic, generator = make(1), nn.Linear(2, 4)
    session = begin()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (critic, generator)]
    session.watch(critic, optimizers[0])
    session.watch(generator, optimizers[1], prefix="generator.")
    printed = []
    for at in rows(NUM_STEPS):
        made = generator(X[at, :2])
        real, fake = F.softplus(-critic(X[at])).mean(), F.softplus(critic(made.detach())).mean()
        (real + fake).backward()
        step(optimizers[0])
        F.softplus(-critic(made)).mean().backward()
        step(optimizers[1])
        critic.zero_grad()
        printed.append((real + fake).item())
    assert seen(reopen()) == pytest.approx(dict(enumerate(printed)), rel=1e-6)


def test_steps_that_are_ended_by_hand_have_it_too(begin: Any, reopen: Any) -> None:
    net, session = make(), begin()
    session.watch(net, [])
    printed = []
    for at in rows(NUM_STEPS):
        loss = F.cross_entropy(net(X[at]), Y[at])
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        session.step()
        printed.append(loss.item())
    assert seen(reopen()) == pytest.approx(dict(enumerate(printed)), rel=1e-6)


def test_a_nonfinite_loss_is_recorded_as_it_is(begin: Any, reopen: Any) -> None:
    net = make()
    begin().watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for factor in (1.0, float("nan"), float("inf")):
        (F.cross_entropy(net(X[:4]), Y[:4]) * factor).backward()
        step(optimizer)
    found = seen(reopen())
    assert found[0] > 0
    assert not any(torch.isfinite(torch.tensor(found[step])) for step in (1, 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_compiled_models_and_steps(begin: Any, reopen: Any) -> None:
    net = make()
    compiled = torch.compile(net, backend="eager")
    begin().watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def train(at: slice) -> Tensor:
        loss = F.cross_entropy(compiled(X[at]), Y[at])
        loss.backward()
        return loss.detach()

    printed = []
    for at in rows(NUM_STEPS):
        printed.append(train(at).item())
        step(optimizer)
    assert seen(reopen()) == pytest.approx(dict(enumerate(printed)), rel=1e-6)


def test_what_is_logged_wins(begin: Any, reopen: Any) -> None:
    from sonde.diagnose.measures.loss import loss_name, validation_name
    from sonde.show.summary import loss_series

    net, session = make(), begin()
    session.watch(net)
    for loss in function(net, torch.optim.SGD(net.parameters(), lr=0.1)):
        session.log({"train/loss": 2 * loss, "val/loss": loss})
    run = reopen()
    assert loss_name(run.window()) == loss_series(run).name == "train/loss"
    assert validation_name(run.window()) == "val/loss"


def test_with_inspect_off_nothing_is_seen(begin: Any, reopen: Any) -> None:
    net = make()
    begin().watch(net, inspect=False)
    list(function(net, torch.optim.SGD(net.parameters(), lr=0.1)))
    assert seen(reopen()) == {}


# ---------------------------------------------------------------------------------------------- the validation loss


class WithLoss(nn.Module):
    """A model that computes its own loss, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": 2 * F.cross_entropy(logits, y) + logits.square().mean(), "logits": logits}


class Margin(nn.Module):
    """A criterion that is written by hand."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return (1 - output.gather(1, y[:, None])).relu().mean()


def mean_of(losses: list[tuple[float, int]]) -> float:
    return sum(loss * num for loss, num in losses) / sum(num for _, num in losses)


ENTROPY, MARGIN = nn.CrossEntropyLoss(), Margin()
LOSSES: dict[str, Any] = {
    "function": (make, lambda net, x, y: F.cross_entropy(net(x), y)),
    "half": (make, lambda net, x, y: 0.5 * F.cross_entropy(net(x), y)),
    "module": (make, lambda net, x, y: ENTROPY(net(x), y)),
    "own module": (make, lambda net, x, y: MARGIN(net(x), y)),
    "own loss": (WithLoss, lambda net, x, y: net(x, y)["loss"]),
    "regression": (make, lambda net, x, y: F.mse_loss(net(x)[:, :1], x.sum(1, keepdim=True))),
}


def evaluate(net: Any, loss_of: Any, batches: Any) -> float:
    """What a program prints after an evaluation: the mean over samples."""
    return mean_of([(loss_of(net, x, y).item(), len(x)) for x, y in batches])


def train_epochs(net: Any, loss_of: Any, validate: Callable[[], Any], *, num_micro: int = 1, epochs: int = 3) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(X[:24], Y[:24]), batch_size=6)
    for _ in range(epochs):
        net.train()
        for number, (x, y) in enumerate(data):
            (loss_of(net, x, y) / num_micro).backward()
            if number % num_micro == num_micro - 1:
                step(optimizer)
        net.eval()
        validate()


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_validation_loss_is_at_its_step(begin: Any, reopen: Any, kind: str, mode: Any, num_micro: int) -> None:
    build, loss_of = LOSSES[kind]
    net, printed = build(), []
    session = begin()
    session.watch(net)

    def validate() -> None:
        with mode():
            value = evaluate(net, loss_of, DataLoader(HELD_OUT, batch_size=8))  # the last batch has four
        printed.append((session.step_number, value))

    train_epochs(net, loss_of, validate, num_micro=num_micro)
    run = reopen()
    assert [at for at, _ in printed] == [4 // num_micro * epoch - 1 for epoch in (1, 2, 3)]
    assert seen(run, SEEN_VALIDATION) == pytest.approx(dict(printed), rel=1e-5)
    assert len(seen(run)) == 12 // num_micro
    assert run.warnings == []


def test_an_evaluation_with_gradients_on_is_one_in_eval_mode(begin: Any, reopen: Any) -> None:
    net, printed = make(), []
    begin().watch(net)
    loss_of = LOSSES["function"][1]
    train_epochs(net, loss_of, lambda: printed.append(evaluate(net, loss_of, DataLoader(HELD_OUT, batch_size=8))))
    run = reopen()
    assert list(seen(run, SEEN_VALIDATION).values()) == pytest.approx(printed, rel=1e-5)


def test_without_a_loader_too_and_before_the_first_step(begin: Any, reopen: Any) -> None:
    net, printed = make(), []
    begin().watch(net)
    loss_of = LOSSES["function"][1]

    def validate() -> None:
        with torch.no_grad():
            printed.append(loss_of(net, X[40:], Y[40:]).item())

    validate()
    train_epochs(net, loss_of, validate, epochs=2)
    assert seen(reopen(), SEEN_VALIDATION) == pytest.approx({0: printed[0], 3: printed[1], 7: printed[2]}, rel=1e-5)


@pytest.mark.parametrize("sets", ["test after it", "train before it", "made again", "one set, two samplers"])
def test_the_validation_set_differs_from_others(begin: Any, reopen: Any, sets: str) -> None:
    net, printed = make(), []
    begin().watch(net)
    loss_of = LOSSES["function"][1]
    train = TensorDataset(X[:24], Y[:24])
    everything = TensorDataset(X, Y)
    held_out, test = Subset(everything, range(40, 50)), TensorDataset(X[50:], Y[50:])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if sets == "one set, two samplers":
        loader = DataLoader(everything, 6, sampler=SubsetRandomSampler(range(24)))
        part = DataLoader(everything, 8, sampler=SubsetRandomSampler(range(40, 60)))
    else:
        loader, part = DataLoader(train, 6), DataLoader(held_out, 4)
    for _ in range(3):
        for x, y in loader:
            loss_of(net, x, y).backward()
            step(optimizer)
        with torch.no_grad():
            if sets == "train before it":
                evaluate(net, loss_of, DataLoader(train, 12))
            if sets == "made again":
                part = DataLoader(TensorDataset(X[40:50].clone(), Y[40:50]), 4)
            printed.append(evaluate(net, loss_of, part))
            if sets == "test after it":
                evaluate(net, loss_of, DataLoader(test, 4))
    if sets == "test after it":
        loss_of(net, X[:6], Y[:6]).backward()
        step(optimizer)
        with torch.no_grad():
            evaluate(net, loss_of, DataLoader(test, 4))
    assert seen(reopen(), SEEN_VALIDATION) == pytest.approx({3: printed[0], 7: printed[1], 11: printed[2]}, rel=1e-5)


def test_a_loss_with_an_added_term_has_no_validation_loss_that_can_be_seen(begin: Any, reopen: Any) -> None:
    net = make()
    begin().watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for at in rows(3):
        (F.cross_entropy(net(X[at]), Y[at]) + net(X[at]).square().mean()).backward()
        step(optimizer)
        with torch.no_grad():
            F.cross_entropy(net(X[40:]), Y[40:])
    run = reopen()
    assert len(seen(run)) == 3
    assert seen(run, SEEN_VALIDATION) == {}


def test_sums_are_compared_with_sums_and_means_with_means(begin: Any, reopen: Any) -> None:
    net = make()
    begin().watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    F.cross_entropy(net(X[:6]), Y[:6], reduction="sum").backward()
    step(optimizer)
    with torch.no_grad():
        sums = [F.cross_entropy(net(X[a:b]), Y[a:b], reduction="sum").item() for a, b in ((40, 50), (50, 60))]
    (F.cross_entropy(net(X[:6]), Y[:6], reduction="sum") / 6).backward()
    step(optimizer)
    with torch.no_grad():
        mean = F.cross_entropy(net(X[40:]), Y[40:], reduction="sum").item() / 20
    assert seen(reopen(), SEEN_VALIDATION) == pytest.approx({0: sum(sums) / 2, 1: mean}, rel=1e-5)


def test_a_teacher_and_a_copy_are_not_evaluated(begin: Any, reopen: Any) -> None:
    net = make()
    teacher = copy.deepcopy(net)
    begin().watch(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for at in rows(3):
        output = net(X[at])
        with torch.no_grad():
            F.cross_entropy(teacher(X[at]), Y[at])
        F.cross_entropy(output, Y[at]).backward()
        step(optimizer)
    assert seen(reopen(), SEEN_VALIDATION) == {}
