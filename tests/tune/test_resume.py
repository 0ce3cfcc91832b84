"""A run that is restored goes on bit by bit as if it had never stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sonde
from sonde.errors import UsageError
from sonde.read.tables import checkpoint_table

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ("adamw", "lambda"),
        ("fused", "onecycle"),
        ("tensor_lr", "lambda"),
        ("momentum", "sequential"),
        ("rmsprop", "multistep"),
    ],
)
def test_restored_training_is_bit_identical(training, folder, optimizer, scheduler):
    straight = training(optimizer, scheduler)
    straight.train(20)

    first = training(optimizer, scheduler)
    first.train(10)
    first.manager(folder).save(10)

    second = training(optimizer, scheduler, seed=7)  # other weights, other random numbers
    second.num_steps = second.manager(folder).restore()
    second.train(20)

    assert first.losses + second.losses == straight.losses
    assert second.fingerprint() == straight.fingerprint()


@pytest.mark.parametrize("background", [False, True])
def test_saving_changes_nothing(training, folder, background):
    plain = training()
    plain.train(12)
    saving = training()
    manager = saving.manager(folder, interval=2, background=background)
    saving.train(12, lambda step, loss: manager.step(step) and None)
    manager.close()
    assert [found.step for found in manager.list()] == [2, 4, 6, 8, 10, 12]
    assert saving.losses == plain.losses
    assert saving.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize("stop", [8, 16])
def test_the_end_of_an_epoch_is_a_place_to_stop(training, folder, stop):
    """Eight batches make an epoch."""
    straight = training()
    straight.train(20)
    first = training()
    first.train(stop)
    first.manager(folder).save(stop)
    second = training(seed=3)
    second.num_steps = second.manager(folder).restore()
    second.train(20)
    assert first.losses + second.losses == straight.losses
    assert second.loader.epoch == straight.loader.epoch


def test_background_saves_hold_the_moment_they_were_asked_for(training, folder):
    straight = training()
    straight.train(20)
    first = training()
    manager = first.manager(folder, interval=10, background=True)
    first.train(15, lambda step, loss: manager.step(step) and None)
    manager.close()
    second = training(seed=3)
    second.num_steps = second.manager(folder).restore(10)
    second.train(20)
    assert second.fingerprint() == straight.fingerprint()


def test_the_runs_steps_go_on_and_none_is_recorded_twice(training, tmp_path):
    def record(stop: int, resume: bool) -> None:
        run = training(seed=int(resume))
        with sonde.init(project="p", name="n", dir=tmp_path, resume=resume) as session:
            session.watch(run.net, run.optimizer)
            manager = run.manager(session, interval=4)
            run.num_steps = manager.restore_latest()

            def after(step: int, loss: float) -> None:
                session.log({"loss": loss})
                manager.step(step, {"eval_loss": loss})

            run.train(stop, after)

    record(10, resume=False)  # the last checkpoint is of step 8
    before = sonde.open("p/n", dir=tmp_path).stats("grad/4.weight/*").to_pylist()
    record(14, resume=True)
    straight = training()
    straight.train(14)

    run = sonde.open("p/n", dir=tmp_path)
    logged = run.scalars("loss").to_pylist()
    assert [row["step"] for row in logged] == list(range(14))
    assert [row["value"].hex() for row in logged] == straight.losses
    rows = run.stats("grad/4.weight/norm").to_pylist()
    assert [row["step"] for row in rows] == list(range(14))
    assert run.stats("grad/4.weight/*", steps=slice(0, 10)).to_pylist() == before
    assert [row["step"] for row in run.checkpoints().to_pylist()] == [4, 8, 12]
    assert checkpoint_table(run.path, is_live=False).column("step").to_pylist() == [4, 8, 12]


def test_a_restore_in_a_running_session_lets_the_numbers_go_on(training, tmp_path):
    run = training()
    with sonde.init(project="p", name="n", dir=tmp_path) as session:
        session.watch(run.net, run.optimizer)
        manager = run.manager(session, interval=4)

        def after(step: int, loss: float) -> None:
            session.log({"loss": loss})
            manager.step(step)

        run.train(6, after)
        manager.restore()
        run.train(10, lambda step, loss: session.log({"loss": loss}))
    rows = sonde.open("p/n", dir=tmp_path).scalars("loss").to_pylist()
    assert [row["step"] for row in rows] == list(range(10))


def test_another_data_set_is_noticed(training, folder):
    run = training()
    run.train(3)
    run.manager(folder).save(3)
    other = training()
    other.loader.loader = torch.utils.data.DataLoader(list(range(7)), 5)
    with pytest.raises(UsageError, match="8 batches in an epoch, this loader has 2"):
        other.manager(folder).restore()


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "scheduler"), [("adamw", "lambda"), ("momentum", "sequential")])
def test_a_new_process_with_workers_goes_on_bit_by_bit(tmp_path, optimizer, scheduler):
    def child(*jobs: tuple[Path, int, int, int]) -> list[dict]:
        arguments = [str(part) for folder, *rest in jobs for part in (folder, optimizer, scheduler, *rest)]
        done = subprocess.run(
            [sys.executable, str(HERE / "child_resume.py"), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    straight, before = child((tmp_path / "straight", 0, 20, 0), (tmp_path / "parts", 0, 10, 0))
    # Another interpreter, in which nothing is left of the first.
    (after,) = child((tmp_path / "parts", 10, 20, 99))
    assert before["losses"] + after["losses"] == straight["losses"]
    assert after["fingerprint"] == straight["fingerprint"]
    assert len(set(straight["losses"])) == 20
