"""One lane of a benchmark of real training: a process that trains one model with one recorder, from its first step.

    python benchmarks/lane.py MODEL ARM --device cuda --steps 2000 --folder FOLDER

Prints one JSON object: the seconds of attaching, of each step and of finishing. On a GPU a step's time is that of the
device's clock, from event to event; nothing waits for the device before the end. On a machine that does other work,
`--clock cpu` counts the CPU time of the process with all of its threads, for sonde's own account too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from real_models import CPU_MODELS, GPU_MODELS, Workload

EVERY = 10
"""Steps between two records of the other tools."""


class Recorder(Protocol):
    """The work of a lane in addition to training."""

    def after_step(self, step: int) -> None: ...
    def finish(self) -> None: ...

    def facts(self) -> dict[str, Any]:
        """The recorder's own account."""
        return {}


class Nothing(Recorder):
    """Training alone."""

    def __init__(self, workload: Workload, folder: Path) -> None: ...


class Sonde(Recorder):
    """`sonde.watch(model, optimizer)`, with the given keywords."""

    def __init__(self, workload: Workload, folder: Path, **keywords: Any) -> None:
        import sonde

        sonde.init(project="real", dir=folder, verbose=False)
        self.session: Any = sonde.watch(workload.model, workload.optimizer, **keywords)

    def finish(self) -> None:
        assert self.session.recording.breaker.num_errors == 0, "sonde failed: see above"
        self.session.finish()

    def facts(self) -> dict[str, Any]:
        manifest = json.loads((Path(self.session.path) / "run.json").read_text())
        return {"account": manifest["facts"]["overhead"], "grad_steps": self._recorded_steps()}

    def _recorded_steps(self) -> list[int]:
        """The steps at which gradients were recorded."""
        import sonde

        return sorted(set(sonde.open(self.session.path).stats("grad/*/norm")["step"].to_pylist()))


class Wandb(Recorder):
    """`wandb.watch(model, log="all")`, offline, every tenth step."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        import wandb

        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True)
        self.run = wandb.init(project="real", dir=str(folder), mode="offline", settings=settings)
        self.run.watch(workload.model, log="all", log_freq=EVERY)

    def after_step(self, step: int) -> None:
        self.run.log({"step": step})

    def finish(self) -> None:
        self.run.finish()


class TensorBoard(Recorder):
    """`add_histogram` of every parameter and gradient, every tenth step."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.model, self.writer = workload.model, SummaryWriter(str(folder))  # type: ignore[no-untyped-call]

    def after_step(self, step: int) -> None:
        if step % EVERY:
            return
        for name, parameter in self.model.named_parameters():
            self.writer.add_histogram(f"param/{name}", parameter, step)  # type: ignore[no-untyped-call]
            if parameter.grad is not None:
                self.writer.add_histogram(f"grad/{name}", parameter.grad, step)  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self.writer.close()  # type: ignore[no-untyped-call]


OPTIMIZER_SIDE: dict[str, Any] = {"activations": False, "inspect": False, "budget": None}
ARMS: dict[str, Callable[[Workload, Path], Recorder]] = {
    "none": Nothing,
    "default": Sonde,
    "optimizer side": lambda workload, folder: Sonde(workload, folder, **OPTIMIZER_SIDE),
    "optimizer side, no check": lambda workload, folder: Sonde(workload, folder, check_finite=False, **OPTIMIZER_SIDE),
    "everything": lambda workload, folder: Sonde(workload, folder, budget=None),
    "wandb": Wandb,
    "tensorboard": TensorBoard,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted({*GPU_MODELS, *CPU_MODELS}))
    parser.add_argument("arm", choices=list(ARMS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--turn", type=int, default=0, help="wait for a line on stdin before each of so many steps")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--profile", type=Path, help="write a profile of the training thread to this file")
    options = parser.parse_args()
    if options.clock == "cpu":
        time.perf_counter = time.process_time  # before sonde is imported
    torch.manual_seed(0)
    if options.device == "cpu":
        torch.set_num_threads(1)
    models = GPU_MODELS if options.device == "cuda" else CPU_MODELS
    workload = models[options.model].build(options.device)
    print(json.dumps(run(workload, ARMS[options.arm], options)))


def run(workload: Workload, arm: Callable[[Workload, Path], Recorder], options: argparse.Namespace) -> dict[str, Any]:
    clock = EventClock() if options.device == "cuda" else HostClock()
    began_s = time.perf_counter()
    recorder = arm(workload, options.folder)
    attach_s = time.perf_counter() - began_s
    profile = profiler() if options.profile else None
    clock.mark()
    for step in range(options.steps):
        if options.turn and step % options.turn == 0:
            print("ready", flush=True)
            sys.stdin.readline()
            clock.skip()
        workload.step()
        recorder.after_step(step)
        clock.mark()
    if profile:
        profile.dump_stats(options.profile)
    if options.device == "cuda":
        torch.cuda.synchronize()
    trained_s = time.perf_counter()
    recorder.finish()
    finish_s = time.perf_counter() - trained_s
    return {"attach_s": attach_s, "steps_s": clock.laps(), "finish_s": finish_s, **recorder.facts()}


def profiler() -> Any:
    import cProfile

    profile = cProfile.Profile()
    profile.enable()
    return profile


class HostClock:
    """The time of each step by the host's clock, or the CPU time."""

    def __init__(self) -> None:
        self._laps: list[float] = []
        self._began_s = 0.0

    def mark(self) -> None:
        now = time.perf_counter()
        self._laps.append(now - self._began_s)
        self._began_s = now

    def skip(self) -> None:
        """The next lap begins now."""
        self._began_s = time.perf_counter()

    def laps(self) -> list[float]:
        return self._laps[1:]


class EventClock:
    """The time of each step by the device's clock."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        self._marks.append(event)

    def laps(self) -> list[float]:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self._marks, self._marks[1:], strict=False)]  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
