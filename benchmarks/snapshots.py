"""The cost of a snapshot on the training thread, compared with a synchronous `torch.save` of the same tensors.

    python benchmarks/snapshots.py                    # about three minutes on two cores
    python benchmarks/snapshots.py --device cuda      # a larger model on a GPU

One model is trained. In each round, one step takes a snapshot, one does not, and a third saves the same tensors with
`torch.save` to the same disk. The cost of a snapshot is the time of sonde's hooks on the training thread in its step,
including the time that the optimizer waits for the copy. It does not include the work of other threads, so steps with
and without a snapshot are compared as well. `torch.save` is not followed by an fsync; sonde's writes are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sonde
from report import describe_machine, folder_bytes, interval

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from small_gpt import SmallGPT, load_text, next_batch

LIMIT = 0.03
RESULTS = Path(__file__).parent / "results"
SIZES = {
    "cpu": {"num_layers": 6, "dim": 384, "num_heads": 6, "context": 128},
    "cuda": {"num_layers": 24, "dim": 1024, "num_heads": 16, "context": 512},
}
BATCH = {"cpu": 8, "cuda": 16}
KINDS = (("param",), ("param", "grad"), ("param", "grad", "optim"))


@dataclass(slots=True)
class Times:
    """Measured seconds, one value of each per round."""

    own_s: list[float] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    plain_step_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)


class Trained:
    """A model that trains one step at a time."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device = device
        self.size = SIZES[device]
        self.model = SmallGPT(**self.size).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._text, self._generator = load_text(), torch.Generator().manual_seed(0)

    def step(self, before_update: Any = None) -> float:
        x, y = next_batch(self._text, batch=BATCH[self.device], context=self.size["context"], generator=self._generator)
        began = time.perf_counter()
        self.model(x.to(self.device), y.to(self.device)).backward()
        if before_update is not None:
            self.sync()
            before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sync()
        return time.perf_counter() - began

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def tensors(self, kinds: tuple[str, ...]) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        found = {f"param/{name}": p.detach() for name, p in named.items()}
        if "grad" in kinds:
            found |= {f"grad/{name}": p.grad for name, p in named.items() if p.grad is not None}
        if "optim" in kinds:
            states = {name: self.optimizer.state[p] for name, p in named.items()}
            found |= {f"optim/{name}.{key}": t for name, state in states.items() for key, t in state.items()}
        return found


def measure(device: str, kinds: tuple[str, ...], rounds: int, folder: Path) -> dict[str, Any]:
    trained, times = Trained(device), Times()
    session: Any = sonde.init(project="benchmark", dir=folder / "runs", verbose=False, live_rules=False)
    session.watch(trained.model, trained.optimizer, snapshots=sonde.Snapshots(when=False, kinds=kinds))
    for _ in range(2):
        trained.step()
    for number in range(rounds + 2):
        _round(trained, session, kinds, times, folder / "saved.pt", is_counted=number >= 2)
        print(f"{device} {'+'.join(kinds)} {number + 1}/{rounds + 2}", file=sys.stderr, flush=True)
    sizes = [t.nbytes for t in trained.tensors(kinds[:1] + tuple(k for k in kinds[1:] if k == "optim")).values()]
    nbytes = sum(sizes) + (sum(p.nbytes for p in trained.model.parameters()) if "grad" in kinds else 0)
    counts = dict(session.steps.snapshots.ledger.counts)
    session.finish()
    stored = folder_bytes(session.path / "tensors") / max(counts["taken"], 1)
    return _result(times, kinds, nbytes, stored, counts)


def _round(
    trained: Trained, session: Any, kinds: tuple[str, ...], times: Times, file: Path, *, is_counted: bool
) -> None:
    session.flush(120)
    session.snapshot()
    step_s = trained.step()
    own_s = session.steps.training.governing.meter._now.host_s.get("snapshots", 0.0)
    began = time.perf_counter()
    session.flush(120)
    write_s = time.perf_counter() - began
    plain_step_s = trained.step()
    saved: list[float] = []

    def save() -> None:
        began = time.perf_counter()
        torch.save(trained.tensors(kinds), file)
        saved.append(time.perf_counter() - began)

    trained.step(save)
    if is_counted:
        times.own_s.append(own_s)
        times.step_s.append(step_s)
        times.plain_step_s.append(plain_step_s)
        times.write_s.append(write_s)
        times.save_s.append(saved[0])


def _result(times: Times, kinds: tuple[str, ...], nbytes: int, stored: float, counts: dict[str, int]) -> dict[str, Any]:
    ratio, bounds = interval([own / save for own, save in zip(times.own_s, times.save_s, strict=True)])
    added, added_bounds = interval(
        [(a - b) / s for a, b, s in zip(times.step_s, times.plain_step_s, times.save_s, strict=True)]
    )
    return {
        "kinds": list(kinds),
        "mib": nbytes / (1 << 20),
        "stored_mib": stored / (1 << 20),
        "own_ms": 1e3 * interval(times.own_s)[0],
        "save_ms": 1e3 * interval(times.save_s)[0],
        "ratio": ratio,
        "ratio_interval": bounds,
        "step_ms": 1e3 * interval(times.step_s)[0],
        "plain_step_ms": 1e3 * interval(times.plain_step_s)[0],
        "added_of_save": added,
        "added_interval": added_bounds,
        "counts": counts,
    }


def as_markdown(report: dict[str, Any]) -> str:
    machine = report["machine"]
    lines = [
        "# Cost of a snapshot on the training thread",
        "",
        f"Made by `{report['command'].strip()}` on {report['date']}, commit `{report['commit']}`: {report['device']};",
        f"{machine['processor']}, {machine['cores']} cores, {machine['torch_threads']} torch thread(s);",
        f"torch {report['versions']['torch']}. {report['rounds']} rounds; medians with 95 % bootstrap intervals.",
        "",
        f"{report['what']}.",
        "",
        "| kinds | MiB | training thread, ms | `torch.save`, ms | **ratio** | step with / without, ms | longer by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        low, high = row["ratio_interval"]
        added_low, added_high = row["added_interval"]
        lines.append(
            f"| {', '.join(row['kinds'])} | {row['mib']:.0f} | {row['own_ms']:.2f} | {row['save_ms']:.0f} | "
            f"**{row['ratio']:.2%}** ({low:.2%} to {high:.2%}) | {row['step_ms']:.0f} / {row['plain_step_ms']:.0f} | "
            f"{row['added_of_save']:.0%} ({added_low:.0%} to {added_high:.0%}) |"
        )
    lines += [
        "",
        "*Training thread*: everything sonde's hooks do there for a snapshot, including the wait for a copy that is",
        "unfinished when the optimizer steps. *Longer by*: the step with a snapshot minus the step without, as a",
        "fraction of `torch.save`. It includes the time that the copying and writing threads take from the model's,",
        "which happens if every core is busy. If its interval contains 0, the effect is lost in the variation between",
        f"steps, and the number is not significant. The goal is a ratio below {LIMIT:.0%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=sorted(SIZES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    size = SIZES[options.device]
    report: dict[str, Any] = {
        "command": "python benchmarks/snapshots.py " + " ".join(sys.argv[1:]),
        **describe_machine(threads=options.threads),
        "device": device,
        "rounds": options.rounds,
        "what": f"GPT: {size['num_layers']} layers, d={size['dim']}, batch {BATCH[options.device]}×{size['context']}, "
        "float32, AdamW",
        "rows": [],
    }
    for kinds in KINDS:
        with tempfile.TemporaryDirectory(prefix="sonde-snapshots-") as folder:
            report["rows"].append(measure(options.device, kinds, options.rounds, Path(folder)))
    name = "snapshots" if options.device == "cpu" else f"snapshots-{options.device}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    text = as_markdown(report)
    (options.out / f"{name}.md").write_text(text)
    print(text)
    sys.exit(any(row["ratio"] > LIMIT for row in report["rows"]))


if __name__ == "__main__":
    main()
