"""Several threads that train in one session: each counts its own steps, and nothing is lost or mixed."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import sonde
from sonde.session.snapshot_plan import Snapshots

NUM_STEPS = 100
FEW = 30
Pause = Callable[[str], None]


@pytest.fixture
def _eager_switching() -> Iterator[None]:
    """Threads take turns as often as the interpreter allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class Trainer:
    """Trains a model on its own data, and notes in float64 what sonde should record at each step."""

    def __init__(self, name: str, seed: int, num_steps: int = NUM_STEPS, pause: Pause = lambda _: None) -> None:
        torch.manual_seed(seed)
        self.name, self.seed, self.num_steps, self.pause = name, seed, num_steps, pause
        self.model = Net(8 + seed)
        self.plain = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.truth: dict[tuple[str, int], float] = {}
        self.losses: dict[int, float] = {}
        self.error: BaseException | None = None

    def watch(self, session: Any, **options: Any) -> None:
        session.watch(self.model, self.optimizer, prefix=f"{self.name}.", **{"budget": None, **options})

    def __call__(self) -> None:
        try:
            self.train(self.model, self.optimizer, self._note)
        except BaseException as error:  # raised again where pytest sees it
            self.error = error

    def train(self, model: nn.Module, optimizer: Any, note: Callable[..., None] | None = None) -> None:
        data = torch.Generator().manual_seed(self.seed)
        for step in range(self.num_steps):
            x = torch.randn(4 + step % 3, 4, generator=data)
            self.pause("forward")
            loss = model(x).square().mean()
            if note is not None:
                sonde.log({f"{self.name}/loss": loss})
            self.pause("backward")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            before = [p.detach().clone() for p in model.parameters()] if note is not None else []
            self.pause("step")
            optimizer.step()
            if note is not None:
                note(step, loss, before, len(x))
                sonde.log({f"{self.name}/after": step})

    def _note(self, step: int, loss: torch.Tensor, before: list[torch.Tensor], num_rows: int) -> None:
        self.losses[step] = float(loss.detach().double())
        self.truth[f"act/{self.name}/n", step] = num_rows
        for (name, parameter), old in zip(self.model.named_parameters(), before, strict=True):
            site = f"{self.name}.{name}"
            assert parameter.grad is not None
            self.truth[f"grad/{site}/norm", step] = float(parameter.grad.double().norm())
            self.truth[f"param/{site}/norm", step] = float(old.double().norm())
            self.truth[f"update/{site}/norm", step] = float((parameter.detach().double() - old.double()).norm())

    def assert_unharmed(self) -> None:
        """The model is what it becomes without sonde, bit by bit."""
        self.train(self.plain, torch.optim.Adam(self.plain.parameters(), lr=0.01))
        for watched, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(watched, plain)

    def assert_recorded(self, run: Any) -> None:
        """Every row is there, once, at its step, with its value; and no other row."""
        found: dict[tuple[str, int], float] = {}
        for kind in ("grad", "param", "update"):
            for row in run.stats(f"{kind}/{self.name}.*/norm").to_pylist():
                key = f"{row['kind']}/{row['site']}/norm", row["step"]
                assert key not in found
                found[key] = row["value"]
        for row in run.stats(f"act/{self.name}/n").to_pylist():
            found[f"act/{self.name}/n", row["step"]] = row["value"]
        assert found.keys() == {key for key in self.truth if key[0] != f"act/{self.name}/n" or key in found}
        num_acts = sum(site == f"act/{self.name}/n" for site, _ in found)
        assert num_acts >= min(self.num_steps, 100)
        for key, value in found.items():
            assert value == pytest.approx(self.truth[key], rel=2e-5, abs=1e-9), key
        assert dict(_scalars(run, f"{self.name}/loss")) == pytest.approx(self.losses)
        assert _scalars(run, f"{self.name}/after") == [(step, float(step)) for step in range(self.num_steps)]


def _scalars(run: Any, name: str) -> list[tuple[int, float]]:
    table = run.scalars(name)
    return sorted(zip(table["step"].to_pylist(), table["value"].to_pylist(), strict=True))


def _run(*trainers: Any) -> None:
    threads = [threading.Thread(target=trainer) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for trainer in trainers:
        if getattr(trainer, "error", None) is not None:
            raise trainer.error


def _assert_silent(session: Any, capfd: Any) -> None:
    assert session.recording.breaker.num_errors == 0
    assert "warning" not in capfd.readouterr().err


# ---------------------------------------------------------------------------------------------- two threads, two models


@pytest.mark.usefixtures("_eager_switching")
@pytest.mark.parametrize("attempt", range(3))
def test_two_threads_train_two_models(begin: Any, reopen: Any, capfd: Any, attempt: int) -> None:
    session = begin()
    trainers = [Trainer("a", 1 + attempt), Trainer("b", 11 + attempt)]
    for trainer in trainers:
        trainer.watch(session)
    _run(*trainers)
    assert session.step_number + session.recording.is_step_over == NUM_STEPS
    run = reopen()
    _assert_silent(session, capfd)
    for trainer in trainers:
        trainer.assert_recorded(run)
        trainer.assert_unharmed()


@pytest.mark.parametrize("order", ["lockstep", "turns"])
def test_forced_interleavings(begin: Any, reopen: Any, capfd: Any, order: str) -> None:
    """In lockstep both are in the same phase of a step at once; in turns one is always a phase ahead."""
    barrier = threading.Barrier(2)
    session = begin()

    def together(_: str) -> None:
        barrier.wait(20)

    def apart(phase: str) -> None:
        if phase != "backward":
            barrier.wait(20)

    def apart_too(phase: str) -> None:
        if phase != "step":
            barrier.wait(20)

    pauses = (together, together) if order == "lockstep" else (apart, apart_too)
    trainers = [Trainer("a", 1, FEW, pauses[0]), Trainer("b", 2, FEW, pauses[1])]
    for trainer in trainers:
        trainer.watch(session, activations=True)
    _run(*trainers)
    run = reopen()
    _assert_silent(session, capfd)
    for trainer in trainers:
        trainer.pause = lambda _: None
        trainer.assert_recorded(run)
        trainer.assert_unharmed()


@pytest.mark.usefixtures("_eager_switching")
def test_different_numbers_of_steps(begin: Any, reopen: Any, capfd: Any) -> None:
    session = begin()
    trainers = [Trainer("a", 1, 30), Trainer("b", 2, 60), Trainer("c", 3, 45)]
    for trainer in trainers:
        trainer.watch(session)
    _run(*trainers)
    run = reopen()
    _assert_silent(session, capfd)
    for trainer in trainers:
        assert max(run.stats(f"grad/{trainer.name}.first.weight/norm")["step"].to_pylist()) == trainer.num_steps - 1
        assert len(_scalars(run, f"{trainer.name}/loss")) == trainer.num_steps
    trainers[0].assert_recorded(run)


def test_threads_one_after_the_other_count_their_own_steps(begin: Any, reopen: Any) -> None:
    """Whether one has ended before the other begins depends on the machine; the steps must not."""
    session = begin()
    trainers = [Trainer("a", 1, FEW), Trainer("b", 2, FEW)]
    for trainer in trainers:
        trainer.watch(session)
    _run(trainers[0])
    _run(trainers[1])
    run = reopen()
    for trainer in trainers:
        trainer.assert_recorded(run)


def test_models_run_by_the_main_thread_before(begin: Any, reopen: Any) -> None:
    """A first call to see that the shapes fit makes no thread a training thread."""
    session = begin()
    trainers = [Trainer("a", 1, FEW), Trainer("b", 2, FEW)]
    for trainer in trainers:
        trainer.watch(session)
        trainer.model(torch.randn(7, 4))
    _run(*trainers)
    run = reopen()
    for trainer in trainers:
        trainer.assert_recorded(run)


@pytest.mark.usefixtures("_eager_switching")
def test_each_thread_watches_its_own_model(begin: Any, reopen: Any, capfd: Any) -> None:
    session = begin()
    trainers = [Trainer("a", 1, FEW), Trainer("b", 2, FEW)]

    def start(trainer: Trainer) -> Callable[[], None]:
        def watch_and_train() -> None:
            trainer.watch(session)
            trainer()

        return watch_and_train

    _run(*map(start, trainers))
    run = reopen()
    _assert_silent(session, capfd)
    for trainer in trainers:
        trainer.assert_recorded(run)


def test_a_thread_that_dies_holds_nothing_up(begin: Any, reopen: Any) -> None:
    session = begin()

    def fail(phase: str) -> None:
        if phase == "step" and len(trainers[0].losses) == 5:
            raise RuntimeError("planted")

    trainers = [Trainer("a", 1, FEW, fail), Trainer("b", 2, FEW)]
    for trainer in trainers:
        trainer.watch(session)
    with pytest.raises(RuntimeError, match="planted"):
        _run(*trainers)
    run = reopen()
    trainers[1].assert_recorded(run)
    assert run.stats("grad/a.first.weight/norm")["step"].to_pylist() == list(range(5))


# ---------------------------------------------------------------------------------------------------- whose step it is


def test_a_log_from_a_thread_that_trains_nothing_is_of_the_furthest_step(begin: Any, reopen: Any) -> None:
    session = begin()
    trainers = [Trainer("a", 1, 3), Trainer("b", 2, 7)]
    for trainer in trainers:
        trainer.watch(session)
        _run(trainer)
    sonde.log({"outside": 1.0})
    assert _scalars(reopen(), "outside") == [(6, 1.0)]


def test_loops_without_an_optimizer(begin: Any, reopen: Any) -> None:
    session = begin()
    models = {name: Net(8) for name in ("a", "b")}
    for name, model in models.items():
        session.watch(model, prefix=f"{name}.")
    meet = threading.Barrier(2)

    def loop(name: str, num_steps: int) -> Callable[[], None]:
        def train() -> None:
            meet.wait(20)
            for step in range(num_steps):
                models[name].zero_grad()
                models[name](torch.randn(5, 4)).sum().backward()
                sonde.log({f"{name}/number": step})
                sonde.step()

        return train

    _run(loop("a", 20), loop("b", 30))
    run = reopen()
    for name, num_steps in (("a", 20), ("b", 30)):
        assert _scalars(run, f"{name}/number") == [(step, float(step)) for step in range(num_steps)]
        assert run.stats(f"grad/{name}.first.weight/norm")["step"].to_pylist() == list(range(num_steps))


def test_one_worker_thread_trains_two_models_together(begin: Any, reopen: Any) -> None:
    """As a GAN: with one thread for both there is one count, whichever thread has called `watch`."""
    session = begin()
    first, second = Trainer("a", 1), Trainer("b", 2)
    for trainer in (first, second):
        trainer.watch(session)
        trainer.model(torch.randn(2, 4))

    def rounds() -> None:
        for _ in range(10):
            for trainer in (first, second, second):
                trainer.optimizer.zero_grad()
                trainer.model(torch.randn(4, 4)).sum().backward()
                trainer.optimizer.step()

    _run(rounds)
    run = reopen()
    assert run.stats("grad/a.first.weight/norm")["step"].to_pylist() == [0, *range(1, 18, 2)]
    assert run.stats("grad/b.first.weight/norm")["step"].to_pylist() == list(range(20))


def test_a_new_thread_for_each_epoch_continues_the_count(begin: Any, reopen: Any) -> None:
    session = begin()
    model = Net(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.watch(model, optimizer)

    def epoch() -> None:
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).sum().backward()
            optimizer.step()
            sonde.log({"here": 1.0})

    for _ in range(3):
        _run(epoch)
    run = reopen()
    assert run.stats("grad/first.weight/norm")["step"].to_pylist() == list(range(30))
    assert run.scalars("here")["step"].to_pylist() == list(range(30))


def test_steps_handed_to_a_pool_are_counted_by_model(begin: Any, reopen: Any, capfd: Any) -> None:
    """Any of the pool's threads may make any step: a model's steps are one line, whoever makes them."""
    from concurrent.futures import ThreadPoolExecutor

    session = begin()
    trainers = [Trainer("a", 1, FEW), Trainer("b", 2, FEW)]
    for trainer in trainers:
        trainer.watch(session)

    def one_step(trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        trainer.model(torch.randn(4, 4)).sum().backward()
        trainer.optimizer.step()

    with ThreadPoolExecutor(2) as pool:
        one_step(trainers[0])
        one_step(trainers[1])
        for _ in range(49):
            list(pool.map(one_step, trainers))
    run = reopen()
    _assert_silent(session, capfd)
    for name in ("a", "b"):
        steps = run.stats(f"grad/{name}.first.weight/norm")["step"].to_pylist()
        assert len(steps) == len(set(steps)) == 50
        assert max(steps) < 60


@pytest.mark.usefixtures("_eager_switching")
@pytest.mark.parametrize("is_shared", [False, True])
def test_two_threads_train_the_same_model(begin: Any, reopen: Any, capfd: Any, is_shared: bool) -> None:
    """Hogwild: they share one count, and nothing fails. With more layers autograd itself would object."""
    session = begin()
    model = nn.Sequential(nn.Linear(4, 1))
    shared = torch.optim.SGD(model.parameters(), lr=1e-3)
    session.watch(model)

    def train() -> None:
        optimizer = shared if is_shared else torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(NUM_STEPS):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()

    _run(train, train)
    num_steps = session.next_step
    assert num_steps == 2 * NUM_STEPS if is_shared else NUM_STEPS <= num_steps <= 2 * NUM_STEPS
    run = reopen()
    _assert_silent(session, capfd)
    steps = run.stats("grad/0.weight/norm")["step"].to_pylist()
    assert len(steps) == len(set(steps)) > NUM_STEPS // 4
    assert max(steps) < 2 * NUM_STEPS


def test_an_evaluation_in_another_thread_takes_nothing_over(begin: Any, reopen: Any) -> None:
    """Not even with gradients on, and of one of two models that are trained together."""
    session = begin()
    trainers = [Trainer("a", 1, FEW), Trainer("b", 2, FEW)]
    for trainer in trainers:
        trainer.watch(session)

    def evaluate() -> None:
        trainers[0].model(torch.randn(4, 4))

    for step in range(20):
        for trainer in trainers:
            trainer.optimizer.zero_grad()
            trainer.model(torch.randn(4, 4)).sum().backward()
            _run(evaluate)
            trainer.optimizer.step()
        sonde.log({"made": step})
    run = reopen()
    for name in ("a", "b"):
        assert run.stats(f"grad/{name}.first.weight/norm")["step"].to_pylist() == list(range(20))
    assert _scalars(run, "made") == [(step, float(step)) for step in range(20)]


# ------------------------------------------------------------------------------------------------- what goes with steps


def test_clipping_losses_and_scalers_stay_apart(begin: Any, reopen: Any, capfd: Any) -> None:
    """The learning rate, the clipped norm and the loss scale of each optimizer are its own, at each step."""
    session = begin()
    barrier = threading.Barrier(2)
    trainers = [Trainer("a", 1, FEW), Trainer("b", 2, FEW)]
    for trainer in trainers:
        trainer.watch(session)

    def loop(trainer: Trainer, number: int) -> Callable[[], None]:
        def train() -> None:
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (4 + number))
            for step in range(20):
                trainer.optimizer.param_groups[0]["lr"] = 0.01 * (step + 1) * (1 + number)
                trainer.optimizer.zero_grad()
                barrier.wait(20)
                scaler.scale(trainer.model(torch.randn(4, 4)).square().mean()).backward()
                barrier.wait(20)
                scaler.step(trainer.optimizer)
                scaler.update()

        return train

    _run(loop(trainers[0], 0), loop(trainers[1], 1))
    run = reopen()
    _assert_silent(session, capfd)
    for number, name in enumerate(("optim", "optim/1")):
        assert dict(_scalars(run, f"{name}/lr")) == pytest.approx({s: 0.01 * (s + 1) * (1 + number) for s in range(20)})
        assert _scalars(run, f"{name}/loss_scale") == [(step, 2.0 ** (4 + number)) for step in range(20)]


def test_the_training_loss_is_that_of_the_first_model(begin: Any, reopen: Any) -> None:
    session = begin()
    trainers = [Trainer("a", 1, 50), Trainer("b", 2, 50)]
    for trainer in trainers:
        trainer.watch(session)
    _run(*trainers)
    assert dict(_scalars(reopen(), "data/loss/train")) == pytest.approx(trainers[0].losses)


def test_snapshots_are_of_the_thread_that_asked_for_them(begin: Any, reopen: Any) -> None:
    session = begin()
    trainers = [Trainer("a", 1, 20), Trainer("b", 2, 20)]
    trainers[0].watch(session)
    trainers[1].watch(session, snapshots=Snapshots(when=lambda step: step % 10 == 0, kinds=("param",)))
    _run(*trainers)
    run = reopen()
    assert run.tensors.snapshots()["step"].to_pylist() == [0, 10]
    assert {name.split(".")[0] for name in run.tensors.snapshot(10)} == {"param/b"}


def test_rewind_is_refused_once_several_threads_have_trained(begin: Any, reopen: Any, capfd: Any) -> None:
    session = begin()
    assert session.rewind(10)
    trainers = [Trainer("a", 1, 5), Trainer("b", 2, 7)]
    for trainer in trainers:
        trainer.watch(session)
    _run(*trainers)
    assert not session.rewind(11)
    assert "several threads" in capfd.readouterr().err
    run = reopen()
    assert run.stats("grad/a.first.weight/norm")["step"].to_pylist() == list(range(10, 15))
    assert run.stats("grad/b.first.weight/norm")["step"].to_pylist() == list(range(10, 17))


def test_a_resumed_run_begins_where_the_slowest_thread_was(begin: Any, monkeypatch: Any) -> None:
    """And after a kill all steps of the fastest are shown. A thread that has ended is not waited for."""
    session = begin()
    is_there, may_end = threading.Event(), threading.Event()

    def stop_at_three(phase: str) -> None:
        if phase == "step" and len(slow.losses) == 3:
            is_there.set()
            may_end.wait(20)

    def wait_at_five(phase: str) -> None:
        if phase == "forward" and len(fast.losses) == 5:
            is_there.wait(20)

    slow, fast = Trainer("a", 1, 5, stop_at_three), Trainer("b", 2, 12, wait_at_five)
    for trainer in (slow, fast):
        trainer.watch(session)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(session.recording.writer, "set_step", lambda step, visible=-1: told.append((step, visible)))
    threads = [threading.Thread(target=trainer) for trainer in (slow, fast)]
    for thread in threads:
        thread.start()
    threads[1].join(20)
    assert told[-1] == (3, 11)
    may_end.set()
    threads[0].join(20)
    assert told[-1] == (4, 11)


def test_one_thread_marks_its_steps_as_before(begin: Any, monkeypatch: Any) -> None:
    session = begin()
    trainer = Trainer("a", 1, 5)
    trainer.watch(session)
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(session.recording.writer, "set_step", lambda step, visible=-1: told.append((step, visible)))
    _run(trainer)
    assert told == [(step, -1) for step in range(1, 5)]


def test_a_model_with_the_same_names_watched_in_another_thread_is_reported(begin: Any, capfd: Any) -> None:
    session = begin()
    first, second = Trainer("a", 1, 2), Trainer("a", 2, 2)
    first.watch(session)
    first()

    def watch() -> None:
        second.watch(session)

    _run(watch)
    assert "no longer recorded" in capfd.readouterr().err


def test_an_error_in_a_forward_pass_does_not_stop_another_thread_from_being_measured(begin: Any, reopen: Any) -> None:
    """The main thread has entered the model and never left it as a model is left."""
    session = begin()
    trainer = Trainer("a", 1, 10)
    trainer.watch(session)
    with pytest.raises(RuntimeError):
        trainer.model(torch.randn(3, 3))
    _run(trainer)
    trainer.assert_recorded(reopen())


def test_a_pass_that_runs_while_another_thread_is_in_the_model_is_left_out(begin: Any, reopen: Any) -> None:
    session = begin()
    inside, leave = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 5:
                inside.set()
                leave.wait(20)
            return self.inner(x)  # type: ignore[no-any-return]

    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.watch(model, optimizer)

    def train() -> None:
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()

    def meanwhile() -> None:
        inside.wait(20)
        model(torch.randn(3, 4))
        leave.set()

    _run(train, meanwhile)
    run = reopen()
    assert run.stats("act/inner/n")["value"].to_pylist() == [5.0]
    assert run.stats("act/model/n")["value"].to_pylist() == [5.0]


def test_ending_a_step_leaves_models_alone_that_another_thread_may_own(begin: Any, reopen: Any) -> None:
    """Reading the gradients of a model while another thread clears them crashes torch."""
    session = begin()
    models = {name: Net(8) for name in ("a", "b")}
    for name, model in models.items():
        session.watch(model, prefix=f"{name}.")
    for parameter in models["b"].parameters():
        parameter.grad = torch.ones_like(parameter)

    def train() -> None:
        for _ in range(3):
            models["a"](torch.randn(5, 4)).sum().backward()
            sonde.step()

    _run(train)
    run = reopen()
    assert len(run.stats("grad/a.first.weight/norm")) == 3
    assert len(run.stats("grad/b.*/norm")) == 0
