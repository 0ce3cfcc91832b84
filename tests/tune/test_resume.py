"""A restored run continues bit by bit as if it had never stopped."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sonde
from sonde.errors import UsageError
from sonde.read.run.tables import checkpoint_table

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


def test_a_resumed_run_continues_at_its_checkpoint_and_shows_each_step_once(training, tmp_path):
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
    before = sonde.open("p/n", dir=tmp_path).stats("grad/4.weight/*")
    record(14, resume=True)
    straight = training()
    straight.train(14)

    run = sonde.open("p/n", dir=tmp_path)
    logged = run.scalars("loss").to_pylist()
    assert [row["step"] for row in logged] == list(range(14))
    assert [row["value"].hex() for row in logged] == straight.losses
    rows = run.stats("grad/4.weight/norm").to_pylist()
    assert [row["step"] for row in rows] == list(range(14))
    assert run.attempt(0).stats("grad/4.weight/*").equals(before)
    assert run.attempts()["first_step"].to_pylist() == [0, 8]
    assert [row["step"] for row in run.checkpoints().to_pylist()] == [4, 8, 12]
    assert checkpoint_table(run._now).column("step").to_pylist() == [4, 8, 12]


def test_a_restore_in_a_running_session_returns_to_the_step_of_the_checkpoint(training, tmp_path):
    run = training()
    with sonde.init(project="p", name="n", dir=tmp_path) as session:
        session.watch(run.net, run.optimizer)
        manager = run.manager(session, interval=4)

        def after(step: int, loss: float) -> None:
            session.log({"loss": loss})
            manager.step(step)

        run.train(6, after)  # the last checkpoint is of step 4
        first = list(run.losses)
        run.num_steps = manager.restore()
        run.losses = run.losses[:4]
        run.train(10, lambda step, loss: session.log({"loss": loss}))
    opened = sonde.open("p/n", dir=tmp_path)
    rows = opened.scalars("loss").to_pylist()
    assert [row["step"] for row in rows] == list(range(10))
    assert [row["value"].hex() for row in rows] == run.losses
    assert [value.hex() for value in opened.attempt(0).scalars("loss")["value"].to_pylist()] == first


def test_the_latest_checkpoint_is_one_of_the_history_that_continued(training, tmp_path):
    """Ten steps, back to the checkpoint of step 4, two more, and a new process: it must not continue from step 8."""
    run = training()
    with sonde.init(project="p", name="n", dir=tmp_path) as session:
        session.watch(run.net, run.optimizer)
        manager = run.manager(session, interval=4)

        def after(step: int, loss: float) -> None:
            session.log({"loss": loss})
            manager.step(step)

        run.train(10, after)
        assert manager.latest().step == 8
        run.num_steps = manager.restore(4)
        run.optimizer.param_groups[0]["lr"] *= 0.5
        run.losses = run.losses[:4]
        run.train(6, after)
    opened = sonde.open("p/n", dir=tmp_path)
    assert opened.checkpoints()["step"].to_pylist() == [4]
    assert opened.attempt(0).checkpoints()["step"].to_pylist() == [4, 8]

    again = training(seed=3)
    with sonde.init(project="p", name="n", dir=tmp_path, resume=True) as session:
        session.watch(again.net, again.optimizer)
        manager = again.manager(session, interval=4)
        again.num_steps = manager.restore_latest()
        assert again.num_steps == 4
        again.train(9, after)
        session.flush()
        assert manager.latest().step == 8
    rows = opened.scalars("loss").to_pylist()
    assert [row["step"] for row in rows] == list(range(9))
    assert [row["value"].hex() for row in rows] == [*run.losses[:4], *again.losses]
    assert opened.checkpoints()["step"].to_pylist() == [4, 8]
    assert opened.attempt(0).checkpoints()["step"].to_pylist() == [4]  # that of step 8 was replaced
    assert opened.attempts()["first_step"].to_pylist() == [0, 4, 4]
    assert [value.hex() for value in opened.attempt(1).scalars("loss")["value"].to_pylist()] == run.losses


def test_a_checkpoint_belongs_to_the_attempt_that_saved_it_last(training, tmp_path):
    """Its folder is deleted and used again after training has returned to an older checkpoint, without a flush."""
    run = training()
    with sonde.init(project="p", name="n", dir=tmp_path) as session:
        session.watch(run.net, run.optimizer)
        manager = run.manager(session, interval=4)
        run.train(9, lambda step, loss: manager.step(step))
        shutil.rmtree(manager.latest().path)
        run.num_steps = manager.restore(4)
        run.train(9, lambda step, loss: manager.step(step))
    opened = sonde.open("p/n", dir=tmp_path)
    assert opened.checkpoints()["step"].to_pylist() == [4, 8]
    assert opened.attempt(1).checkpoints()["step"].to_pylist() == [4, 8]
    assert opened.attempt(0).checkpoints()["step"].to_pylist() == [4]


def test_another_data_set_is_noticed(training, folder):
    run = training()
    run.train(3)
    run.manager(folder).save(3)
    other = training()
    other.loader.loader = torch.utils.data.DataLoader(list(range(7)), 5)
    with pytest.raises(UsageError, match="8 batches per epoch, but this loader has 2"):
        other.manager(folder).restore()


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "scheduler"), [("adamw", "lambda"), ("momentum", "sequential")])
def test_a_new_process_with_workers_resumes_bit_by_bit(tmp_path, optimizer, scheduler):
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
