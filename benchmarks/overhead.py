"""The overhead of recording: a step with sonde, without it, and with other tools, taking turns in one process.

    python benchmarks/overhead.py                     # both models, all arms, about ten minutes on two cores
    python benchmarks/overhead.py --quick             # a rough result
    python benchmarks/overhead.py --models gpt --threads 2 --name gpt-2-threads

Every arm trains its own copy of one model on the same batches. A round is a few blocks of steps of every arm, with the
arms in random order in each block, so that other load on the machine affects all of them alike. A ratio is an arm's
time in a round divided by the base's time in the same round; the table shows the median over rounds and its bootstrap
interval.

CPU time is that of the process, all threads, and includes the work an arm had left when its block ended (a writer
thread's queue), so that no arm pays for another. Tools whose threads never rest are measured after all others, among
themselves and against a separate base. Wall time stops at the end of the block's last step, because in a real run the
remaining work overlaps with the next step. CPU time of other processes (wandb's service) is not counted.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from arms import Arm, Recording, all_arms
from hooks import OwnHooks
from report import as_markdown, describe_machine, folder_bytes, interval, stats_row_bytes
from sonde.reduce.cpu import native

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from small_gpt import SmallGPT, load_text, next_batch

Batches = Iterator[tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its batches, and how its steps are split into rounds. A round holds whole cycles of ten steps."""

    name: str
    what: str
    build: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    block_steps: int
    blocks: int


class Classifier(nn.Sequential):
    """784-512-512-10, with the loss inside."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(x), y)


def text_batches() -> Batches:
    text, generator = load_text(), torch.Generator().manual_seed(0)
    while True:
        yield next_batch(text, batch=8, context=128, generator=generator)


def image_batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(128, 784, generator=generator), torch.randint(10, (128,), generator=generator)


GPT = "GPT: 4 layers, d=256, 8 heads, batch 8×128, vocabulary 256, AdamW"
MLP = "MLP: 784-512-512-10, batch 128, AdamW"
WORKLOADS = {
    "gpt": Workload("gpt", GPT, lambda: SmallGPT(num_layers=4, dim=256, num_heads=8, context=128), text_batches, 2, 5),
    "mlp": Workload("mlp", MLP, Classifier, image_batches, 20, 5),
}


@dataclass(slots=True)
class Lane:
    """A running arm: its copy of the model, its batches, its recorder, and the times of its rounds."""

    arm: Arm
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    folder: Path
    recording: Recording
    hooks: OwnHooks
    steps: int = 0
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            loss = self.model(*next(self.batches))
            loss.backward()
            self.optimizer.step()
            self.recording.after_step(self.steps, loss.detach())
            self.optimizer.zero_grad()
            self.steps += 1

    def measure_block(self, num_steps: int) -> None:
        """Add one block to the times of the current round."""
        with self.hooks.in_place():
            cpu, wall = time.process_time(), time.perf_counter()
            self.train(num_steps)
            self.wall_s[-1] += time.perf_counter() - wall
            self.recording.settle()
            self.cpu_s[-1] += time.process_time() - cpu


def open_lanes(workload: Workload, arms: list[Arm], folder: Path, warmup_share: float) -> list[Lane]:
    torch.manual_seed(0)
    model = workload.build()
    lanes = []
    for number, arm in enumerate(arms):
        own = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(own.parameters(), lr=3e-4)
        place = folder / f"{workload.name}-{number}"
        place.mkdir()
        hooks = OwnHooks()
        with hooks.in_place():
            recording = arm.start(own, optimizer, place)
        lanes.append(Lane(arm, own, optimizer, workload.batches(), place, recording, hooks))
    for lane in lanes:
        say(f"{workload.name}: warming up {lane.arm.name}")
        with lane.hooks.in_place():
            lane.train(max(1, round(lane.arm.warmup_steps * warmup_share)))
            lane.recording.settle()
    return lanes


def run_rounds(workload: Workload, lanes: list[Lane], rounds: int, shuffle: random.Random) -> None:
    began = time.perf_counter()
    for number in range(rounds):
        for lane in lanes:
            lane.cpu_s.append(0.0)
            lane.wall_s.append(0.0)
        for _ in range(workload.blocks):
            for lane in shuffle.sample(lanes, len(lanes)):
                lane.measure_block(workload.block_steps)
        left_s = (time.perf_counter() - began) / (number + 1) * (rounds - number - 1)
        say(f"{workload.name}: round {number + 1} of {rounds}, about {left_s:.0f} s left")


@dataclass(slots=True)
class Result:
    """The cost of one arm. Ratios are to the base of the same round; `relative_to_wandb` compares the added time."""

    what: str
    steps: int
    cpu_ms_per_step: float
    cpu_ratio: float
    cpu_interval: tuple[float, float]
    wall_ratio: float
    wall_interval: tuple[float, float]
    added_cpu_ms_per_step: float
    relative_to_wandb: float | None
    finish_cpu_ms: float
    bytes_per_step: float
    rows_per_step: float | None
    bytes_per_row: float | None
    bytes_per_row_without_hist: float | None
    parameters_identical_to_base: bool | None


def conclude(workload: Workload, lanes: list[Lane]) -> dict[str, Result]:
    """Close every recording, then compare times, bytes and weights."""
    base = lanes[0]
    results: dict[str, Result] = {}
    steps_per_round = workload.block_steps * workload.blocks
    for lane in lanes:
        say(f"{workload.name}: closing {lane.arm.name}")
        cpu = time.process_time()
        with lane.hooks.in_place():
            lane.recording.stop()
        finish_s = time.process_time() - cpu
        ratio, cpu_interval = interval([a / b for a, b in zip(lane.cpu_s, base.cpu_s, strict=True)])
        wall_ratio, wall_interval = interval([a / b for a, b in zip(lane.wall_s, base.wall_s, strict=True)])
        added_ms, _ = interval([1e3 * (a - b) / steps_per_round for a, b in zip(lane.cpu_s, base.cpu_s, strict=True)])
        per_step_ms, _ = interval([1e3 * a / steps_per_round for a in lane.cpu_s])
        rows = stats_row_bytes(lane.folder)
        results[lane.arm.name] = Result(
            what=lane.arm.what,
            steps=lane.steps,
            cpu_ms_per_step=per_step_ms,
            cpu_ratio=ratio,
            cpu_interval=cpu_interval,
            wall_ratio=wall_ratio,
            wall_interval=wall_interval,
            added_cpu_ms_per_step=added_ms,
            relative_to_wandb=None,
            finish_cpu_ms=1e3 * finish_s,
            bytes_per_step=folder_bytes(lane.folder) / lane.steps,
            rows_per_step=rows.num_rows / lane.steps if rows else None,
            bytes_per_row=rows.all_bytes / rows.num_rows if rows else None,
            bytes_per_row_without_hist=rows.bytes_without_hist / rows.num_rows if rows else None,
            parameters_identical_to_base=same_weights(lane, base) if lane.steps == base.steps else None,
        )
    return results


def compare_with_wandb(results: dict[str, Result]) -> None:
    wandb = results.get("wandb.watch")
    for name, result in results.items():
        if wandb is not None and not name.startswith("base"):
            result.relative_to_wandb = result.added_cpu_ms_per_step / wandb.added_cpu_ms_per_step


def same_weights(a: Lane, b: Lane) -> bool:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def say(text: str) -> None:
    """A progress line that overwrites itself on a terminal; elsewhere, only rounds are printed."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif "round" in text:
        print(text, file=sys.stderr, flush=True)


def choose_arms(names: str) -> list[Arm]:
    arms = all_arms()
    wanted = [name.strip() for name in names.split(",")] if names else [arm.name for arm in arms]
    unknown = set(wanted) - {arm.name for arm in arms}
    if unknown:
        known = ", ".join(arm.name for arm in arms)
        raise SystemExit(f"unknown arm {', '.join(sorted(unknown))}; choose from: {known}")
    return [arm for arm in arms if arm.name in wanted or arm.name == "base"]


def set_apart(arms: list[Arm]) -> list[list[Arm]]:
    """Arms that rest between their blocks, and arms that do not; both groups start with the base."""
    restless = [arm for arm in arms if arm.is_restless]
    return [[arm for arm in arms if not arm.is_restless], *([[arms[0], *restless]] if restless else [])]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three rounds and short warm-ups")
    parser.add_argument("--rounds", type=int, help="rounds per model (default 12; quick 3)")
    parser.add_argument("--block-steps", type=int, help="steps per block, instead of the model's default")
    parser.add_argument("--models", default="gpt,mlp", help="gpt, mlp or both (default gpt,mlp)")
    parser.add_argument("--arms", default="", help="only these arms, separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1: idle ones would spin)")
    parser.add_argument("--name", default="overhead", help="write the results to NAME.json and NAME.md")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the results")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    rounds = options.rounds or (3 if options.quick else 12)
    report = {
        "name": options.name,
        "command": "python benchmarks/overhead.py " + " ".join(sys.argv[1:]),
        **describe_machine(threads=options.threads),
        "native_kernel": native.kernel() is not None,
        "rounds": rounds,
        "models": {},
    }
    for name in options.models.split(","):
        workload = WORKLOADS[name]
        block_steps = options.block_steps or workload.block_steps
        workload = Workload(name, workload.what, workload.build, workload.batches, block_steps, workload.blocks)
        results: dict[str, Result] = {}
        for arms in set_apart(choose_arms(options.arms)):
            with tempfile.TemporaryDirectory(prefix="sonde-overhead-") as folder:
                lanes = open_lanes(workload, arms, Path(folder), 0.1 if options.quick else 1.0)
                run_rounds(workload, lanes, rounds, random.Random(0))
                results = results | {k: v for k, v in conclude(workload, lanes).items() if k not in results}
        compare_with_wandb(results)
        parameters = list(lanes[0].model.parameters())
        report["models"][name] = {
            "what": workload.what,
            "num_parameters": sum(p.numel() for p in parameters),
            "num_tensors": len(parameters),
            "steps_per_round": workload.block_steps * workload.blocks,
            "arms": {arm: asdict(result) for arm, result in results.items()},
        }
    say("")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.name}.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    text = as_markdown(report)
    (options.out / f"{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
