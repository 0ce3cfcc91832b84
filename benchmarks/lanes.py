"""Runs the lanes of a benchmark of real training, compares them, and writes the result as JSON, Markdown and a plot."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from real_models import RealModel
from report import describe_machine

HERE = Path(__file__).parent
BLOCK = 100
WARM = 20
"""Steps that are left out of a typical step of the control: memory is allocated, algorithms are chosen."""
FIRST_STEPS = 25
ALLOWED_S, ALLOWED_SHARE = 5.0, 0.01
SHORT_LANES = {"optimizer side": 200, "everything": 50, "wandb": 100, "tensorboard": 100}
"""Lanes besides the default settings, and their number of steps."""

COLUMNS = (
    "model",
    "steps",
    "added, of total",
    "first 10 steps",
    "first 100",
    "last half, median block (highest)",
    "optimizer side, every step",
    "everything, every step",
    "wandb.watch",
    "TensorBoard",
    "control",
)


@dataclass(frozen=True, slots=True)
class Lane:
    """The times of one process, in seconds."""

    attach_s: float
    steps_s: list[float]
    finish_s: float
    account: dict[str, Any] = field(default_factory=dict)
    """What sonde itself says that recording took."""
    grad_steps: list[int] = field(default_factory=list)
    """The steps at which gradients were recorded."""


def arguments(description: str | None, models: dict[str, RealModel]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models), help="which models, separated by commas")
    parser.add_argument("--steps", type=int, help="steps of the default lane; each model has its own number")
    parser.add_argument("--control-steps", type=int, default=300, help="steps of each of the two control lanes")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a machine that does other work"
    )
    parser.add_argument("--lanes", default=",".join(SHORT_LANES), help="further lanes, separated by commas; or none")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args()


def measure(name: str, models: dict[str, RealModel], options: argparse.Namespace, device: str) -> dict[str, Any]:
    """All lanes of one model, one after the other: a control, the default settings, a control, the others. On a GPU, a
    short lane before them compiles the kernels, which later runs on the machine find in Triton's cache."""
    steps = options.steps or models[name].num_steps

    def lane(arm: str, num_steps: int) -> Lane | None:
        return run_lane(name, arm, device, num_steps, options.clock)

    compiling = lane("default", FIRST_STEPS) if device == "cuda" else None
    num_control = min(options.control_steps, steps)
    if options.clock == "cpu":
        first, default = in_turns(name, device, steps, options.clock)
        second = first
    else:
        first, default, second = lane("none", num_control), lane("default", steps), lane("none", num_control)
    if not (first and default and second):
        raise SystemExit("a lane failed: see above")
    found = compare(first, default, second)
    if compiling is not None:
        found["first_run_s"] = sum(compiling.steps_s) - sum(default.steps_s[:FIRST_STEPS])
    for arm in options.lanes.split(","):
        if arm in SHORT_LANES:
            other = lane(arm, SHORT_LANES[arm])
            found[arm] = ratio_of(other.steps_s[WARM:], first, second) if other else None
            print(f"  {arm}: {found[arm]}", flush=True)
    return {"what": models[name].what, "clock": options.clock, **found}


def run_lane(model: str, arm: str, device: str, steps: int, clock: str) -> Lane | None:
    """A lane in a separate process; None if the tool is not installed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE / "lane.py", model, arm, "--device", device]
        command += ["--steps", str(steps), "--folder", folder, "--clock", clock]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            return None
        return Lane(**json.loads(done.stdout.strip().splitlines()[-1]))


def in_turns(model: str, device: str, steps: int, clock: str) -> tuple[Lane, Lane]:
    """A control and the default settings, a block of each in turn: other work on the machine slows down both alike."""
    with tempfile.TemporaryDirectory() as folder:
        lanes, found = [], []
        for arm in ("none", "default"):
            command = [sys.executable, str(HERE / "lane.py"), model, arm, "--device", device, "--turn", str(BLOCK)]
            command += ["--steps", str(steps), "--folder", folder, "--clock", clock]
            lanes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))
        for lane in lanes:
            _answer(lane)
        for at in range(0, steps, BLOCK):
            for lane in lanes:
                assert lane.stdin is not None
                lane.stdin.write("go\n")
                answer = _answer(lane)
                if at + BLOCK >= steps:
                    found.append(Lane(**json.loads(answer)))
        for lane in lanes:
            lane.communicate()
        return found[0], found[1]


def _answer(lane: subprocess.Popen[str]) -> str:
    """The word ready before a block, or the result after the last one."""
    assert lane.stdout is not None
    for line in lane.stdout:
        if line.startswith(("ready", "{")):
            return line.strip()
    raise SystemExit("a lane failed: see above")


def compare(first: Lane, default: Lane, second: Lane) -> dict[str, Any]:
    """The time that the default settings added, against the two controls."""
    usual_s = typical(first, second)
    control_s = [statistics.fmean(pair) for pair in zip(first.steps_s, second.steps_s, strict=True)]
    expected_s = control_s + [usual_s] * (len(default.steps_s) - len(control_s))
    added_s = default.attach_s + default.finish_s + sum(default.steps_s) - sum(expected_s)
    total_s = default.attach_s + sum(default.steps_s) + default.finish_s
    blocks = [
        sum(default.steps_s[at : at + BLOCK]) / sum(expected_s[at : at + BLOCK])
        for at in range(0, len(expected_s) - BLOCK + 1, BLOCK)
    ]
    return {
        "step_ms": 1e3 * usual_s,
        "control": statistics.median(second.steps_s[WARM:]) / statistics.median(first.steps_s[WARM:]),
        "num_steps": len(default.steps_s),
        "first_10": sum(default.steps_s[:10]) / sum(expected_s[:10]),
        "blocks": blocks,
        "attach_s": default.attach_s,
        "finish_s": default.finish_s,
        "added_s": added_s,
        "total_s": total_s,
        "allowed_s": ALLOWED_S + ALLOWED_SHARE * total_s,
        "account": default.account,
        "num_grad_steps": len(default.grad_steps),
        "longest_grad_gap": max((b - a for a, b in pairwise(default.grad_steps)), default=0),
        "longest_late_step": max(default.steps_s[len(default.steps_s) // 2 :]) / usual_s,
        "longest_control_step": max(*first.steps_s[WARM:], *second.steps_s[WARM:]) / usual_s,
    }


def typical(*lanes: Lane) -> float:
    """The mean step of the controls, without the warm-up."""
    return statistics.fmean(statistics.fmean(lane.steps_s[WARM:]) for lane in lanes)


def ratio_of(steps_s: Sequence[float], *controls: Lane) -> float:
    return statistics.fmean(steps_s) / typical(*controls)


def benchmark(models: dict[str, RealModel], options: argparse.Namespace, device: str, name: str) -> None:
    """Measure the models and write `name`.json and `name`.md; models that are not measured now keep their results."""
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{name}.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"models": {}}
    for model in options.models.split(","):
        print(f"{model}:", flush=True)
        found = measure(model, models, options, device)
        commit = describe_machine(threads=1)["commit"]
        known["models"][model] = {**found, "commit": commit}
        print(json.dumps({key: shortened(value) for key, value in found.items()}), flush=True)
        file.write_text(json.dumps(known, indent=1) + "\n")
        (options.out / f"{name}.md").write_text(as_markdown(known["models"]))


def shortened(value: Any) -> Any:
    if isinstance(value, list):
        return [shortened(one) for one in value]
    return round(value, 3) if isinstance(value, float) else value


def as_markdown(models: dict[str, Any]) -> str:
    lines = [
        "# What recording costs, on models that others wrote",
        "",
        "Default settings from step 0, attaching and finishing included; × is relative to the same training without",
        "sonde. `wandb.watch` and TensorBoard histograms record every tenth step.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for found in models.values():
        late = found["blocks"][len(found["blocks"]) // 2 :] or [float("nan")]
        cells = [
            found["what"],
            f"{found['step_ms']:.3g} ms × {found['num_steps']:,}",
            f"{found['added_s']:.1f} s of {found['total_s']:.0f} s ({found['added_s'] / found['total_s']:.1%})",
            f"{found['first_10']:.2f}×",
            f"{found['blocks'][0]:.2f}×" if found["blocks"] else "–",
            f"{statistics.median(late):.3f}× ({max(late):.3f}×)",
            *(times(found.get(arm)) for arm in SHORT_LANES),
            f"{found['control']:.3f}×",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"
