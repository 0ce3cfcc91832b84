"""However a program ends, it ends at once, and its run says truthfully how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import sonde

pytestmark = pytest.mark.slow  # each is a separate program

TRAIN = """
    import os, sys, time, torch, sonde
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = sonde.init(project="end", dir="runs", verbose=False)
    session.watch(model, optimizer)
    def train(steps):
        for step in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            sonde.log({"loss": step})
"""


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    script = Path("script.py")
    script.write_text(textwrap.dedent(TRAIN) + textwrap.dedent(code))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, **options)


def losses(run: Any) -> list[float]:
    return run.scalars("loss").column("value").to_pylist()


def test_a_program_that_ends_by_itself_is_finished() -> None:
    done = run_python("train(5)")
    run = sonde.open("runs/latest")
    assert (done.returncode, run.status, losses(run)) == (0, "finished", [0, 1, 2, 3, 4])


def test_a_program_that_raises_is_crashed_with_its_reason() -> None:
    done = run_python("train(5)\nraise RuntimeError('out of luck')")
    run = sonde.open("runs/latest")
    assert (done.returncode, run.status) == (1, "crashed")
    assert run.reason == "RuntimeError: out of luck"
    assert "out of luck" in done.stderr
    assert losses(run) == [0, 1, 2, 3, 4]


def test_an_exception_inside_the_context_manager_is_a_crash() -> None:
    done = run_python("with session:\n    train(3)\n    raise ValueError('inside')")
    run = sonde.open("runs/latest")
    assert (done.returncode, run.status, run.reason) == (1, "crashed", "ValueError: inside")


def test_a_keyboard_interrupt_is_an_interruption() -> None:
    done = run_python("train(5)\nraise KeyboardInterrupt")
    run = sonde.open("runs/latest")
    assert (run.status, losses(run)) == ("interrupted", [0, 1, 2, 3, 4])
    assert done.returncode in (130, -signal.SIGINT)


def start(code: str) -> subprocess.Popen[str]:
    Path("script.py").write_text(textwrap.dedent(TRAIN) + textwrap.dedent(code))
    process = subprocess.Popen([sys.executable, "script.py"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "ready"
    return process


FOREVER = """
    train(50)
    assert session.flush(60)
    print("ready", flush=True)
    while True:
        train(1)
        print("one more", flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("how", "status"), [(signal.SIGINT, "interrupted"), (signal.SIGKILL, "crashed"), (signal.SIGTERM, "crashed")]
)
def test_a_program_stopped_from_outside_keeps_what_was_acknowledged(how: signal.Signals, status: str) -> None:
    process = start(FOREVER)
    assert sonde.open("runs/latest").status == "running"
    assert [process.stdout.readline() for _ in range(3)] == ["one more\n"] * 3
    process.send_signal(how)
    process.communicate(timeout=60)
    run = sonde.open("runs/latest")
    assert run.status == status
    assert losses(run)[:50] == list(range(50))
    assert run.stats("grad/weight/norm").num_rows >= 50


def test_os_exit_skips_every_shutdown_and_still_loses_nothing_acknowledged() -> None:
    done = run_python("train(20)\nassert session.flush(60)\nos._exit(7)")
    run = sonde.open("runs/latest")
    assert (done.returncode, run.status, losses(run)) == (7, "crashed", list(range(20)))


def test_an_exit_code_is_kept() -> None:
    assert run_python("train(2)\nsys.exit(3)").returncode == 3


def test_a_killed_run_is_resumed_where_it_stopped() -> None:
    process = start(FOREVER)
    process.kill()
    process.communicate(timeout=60)
    done = run_python(
        """
        session.finish()
        first = sonde.runs("runs")[-1]
        session = sonde.init(project="end", dir="runs", resume=str(first.path), verbose=False)
        session.watch(model, optimizer)
        print(session.step_number)
        train(3)
        """
    )
    assert done.returncode == 0, done.stderr
    run = sonde.runs("runs")[-1]
    steps = run.scalars("loss").column("step").to_pylist()
    assert run.status == "finished"
    assert steps == sorted(set(steps)), "a step was recorded twice"
    assert steps[-3:] == [int(done.stdout), int(done.stdout) + 1, int(done.stdout) + 2]


def test_a_fork_does_not_end_the_parents_run() -> None:
    done = run_python(
        """
        train(3)
        pid = os.fork()
        if pid == 0:
            train(5)
            sys.exit(0)
        os.waitpid(pid, 0)
        train(2)
        """
    )
    assert done.returncode == 0, done.stderr
    run = sonde.open("runs/latest")
    assert (run.status, losses(run)) == ("finished", [0, 1, 2, 0, 1])


def test_a_full_disk_warns_once_and_training_continues() -> None:
    done = run_python(
        """
        import resource, signal
        sys.dont_write_bytecode = True  # Python does not notice that it could write only half a file
        train(3)
        session.flush(30)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        for _ in range(5):
            train(20)
            time.sleep(0.3)
        print(bool(session.recording.writer.degraded))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
    assert done.stderr.count("Training continues") == 1, done.stderr
    assert done.stderr.count("sonde: warning") - done.stderr.count("records are lost") == 1, done.stderr
    assert losses(sonde.open("runs/latest"))[:3] == [0, 1, 2]


def test_closed_stderr_does_not_stop_training() -> None:
    script = Path("script.py")
    script.write_text(textwrap.dedent(TRAIN).replace("verbose=False", "verbose=True") + "\ntrain(3)\n")
    done = subprocess.run(f"{sys.executable} script.py 2>&-", shell=True, timeout=120, check=False)
    assert done.returncode == 0
    assert sonde.open("runs/latest").status == "finished"


def test_what_a_library_prints_to_a_closed_stderr_is_not_written_into_a_file_of_ours() -> None:
    """With the first three descriptors closed, the next files that are opened get them."""
    Path("script.py").write_text(
        textwrap.dedent(TRAIN).replace("verbose=False", "verbose=True")
        + "from pathlib import Path\n"
        + textwrap.dedent(
            """
            for _ in range(5):
                train(3)
                session.flush()
                for fd in (0, 1, 2):
                    try:
                        os.write(fd, b"junk")
                    except OSError:
                        pass
            low = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2) if os.path.exists(f"/proc/self/fd/{fd}")]
            Path("low").write_text("\\n".join(low))
            """
        )
    )
    done = subprocess.run(f"{sys.executable} script.py <&- >&- 2>&-", shell=True, timeout=120, check=False)
    assert done.returncode == 0
    run = sonde.open("runs/latest")
    assert str(run.path) not in Path("low").read_text()
    assert (run.status, len(losses(run)), run.warnings, run.verify()) == ("finished", 15, [], [])


def test_without_stderr_nothing_is_printed_to_stdout_instead() -> None:
    Path("script.py").write_text(textwrap.dedent(TRAIN).replace("verbose=False", "verbose=True") + "\ntrain(3)\n")
    done = subprocess.run(
        f"{sys.executable} script.py 2>&-", shell=True, timeout=120, check=False, stdout=subprocess.PIPE
    )
    assert (done.returncode, done.stdout) == (0, b"")


def test_too_many_open_files_at_the_start_are_named() -> None:
    done = run_python(
        """
        import resource
        session.finish()
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), 4096))
        held = []
        try:
            while True:
                held.append(open("/dev/null"))
        except OSError:
            pass
        try:
            sonde.init(project="end", dir="runs", verbose=False)
        except sonde.errors.RunError as error:
            print(error)
        """
    )
    assert "too many files open" in done.stdout, done.stderr
    assert "ulimit -n" in done.stdout


def test_too_many_open_files_in_between_cost_nothing_that_fits() -> None:
    done = run_python(
        """
        import resource
        train(3)
        session.flush(30)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, before[1]))
        for _ in range(5):
            train(4)
            time.sleep(0.7)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        train(3)
        """
    )
    assert done.returncode == 0, done.stderr
    run = sonde.open("runs/latest")
    assert run.status == "finished"
    assert losses(run) == [0, 1, 2, *[0, 1, 2, 3] * 5, 0, 1, 2]
    assert run.verify() == []


@pytest.mark.parametrize("environment", [{"SONDE_MODE": "disabled"}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_a_disabled_session_writes_nothing(environment: dict[str, str]) -> None:
    done = run_python("train(3)\nsession.step(); sonde.batch(1); sonde.finish()", env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    assert not Path("runs").exists()
