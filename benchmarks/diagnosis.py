"""Measure how often the diagnosis is right: train every program of a fault folder under sonde and score the findings.

    python benchmarks/diagnosis.py FOLDER --seeds 0,1,2            train, diagnose, score
    python benchmarks/diagnosis.py FOLDER --traces DIR             keep the recorded runs in DIR, and reuse them
    python benchmarks/diagnosis.py own                             the programs in tests/programs/faults
    python benchmarks/diagnosis.py trainers                        those in tests/programs/trainers
    python benchmarks/diagnosis.py FOLDER --variant loss1000       healthy programs, loss x 1000 (or bf16, half_lr)

FOLDER holds `core.py` and `programs.py` (a REGISTRY of programs with labels, see its README). The report has detection,
diagnosis (a root cause named), false alarms on healthy programs and on fixed twins, precision of labels, how often the
root cause comes first, steps to detection, and whether the place was named, if the program says where its fault is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def observer(folder: Path, base: type) -> Any:
    """An observer that records into `folder`, with only the calls a user would write in a training loop."""
    import sonde

    class WithSonde(base):  # type: ignore[misc]
        def start(self, model: Any, optimizer: Any, loss_fn: Any, total_steps: int, val: Any = None) -> None:
            self.session = sonde.init(project="faults", name="run", dir=str(folder), verbose=False)
            self.session.watch(model, optimizer)

        def before_step(self, step: int, batch: Any) -> None:
            sonde.batch(*batch)

        def after_step(self, step: int, loss: float) -> None:
            sonde.log({"loss": loss})

        def validation(self, step: int, metrics: dict[str, float]) -> None:
            sonde.log(metrics)

        def finish(self) -> Path:
            sonde.finish()
            return Path(self.session.path)

    return WithSonde()


VARIANTS = ("loss1000", "bf16", "half_lr")


def vary(job: Any, variant: str) -> None:
    """Change a program in a way that does not affect its health."""
    import torch

    optimizers = list(job.optimizer.values()) if isinstance(job.optimizer, dict) else [job.optimizer]
    if variant == "loss1000":
        loss_fn = job.loss_fn
        job.loss_fn = lambda output, target: 1000 * loss_fn(output, target)
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.SGD):  # for plain SGD, scaling the loss scales the learning rate
                _scale_lr(optimizer, 1e-3, job.scheduler)
        job.clip = None if job.clip is None else 1000 * job.clip
    elif variant == "bf16":
        forward = job.model.forward

        def in_bf16(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                output = forward(*args, **kwargs)
            return output.float() if isinstance(output, torch.Tensor) else output

        job.model.forward = in_bf16
    elif variant == "half_lr":
        for optimizer in optimizers:
            _scale_lr(optimizer, 0.5, job.scheduler)


def _scale_lr(optimizer: Any, factor: float, scheduler: Any) -> None:
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] *= factor
    if scheduler is not None:
        scheduler.base_lrs = [factor * rate for rate in scheduler.base_lrs]


def record(spec: Any, seed: int, fixed: bool, traces: Path, core: Any, variant: str = "") -> Path:
    """The run of one program; trains it only if the run does not exist yet."""
    folder = traces / f"{spec.id}-{seed}{'-twin' if fixed else ''}{'-' + variant if variant else ''}"
    done = folder / "done"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if hasattr(spec, "run"):  # it records itself
            done.write_text(str(spec.run(folder, seed, fixed=fixed).relative_to(folder)))
            return folder / done.read_text()
        job = spec.build(seed, fixed=fixed) if hasattr(spec, "build") else core.build(spec, seed, fixed)
        vary(job, variant)
        path = core.train(job, observer(folder, core.Observer))
        done.write_text(str(path.relative_to(folder.resolve()) if path.is_absolute() else path))
    return folder / done.read_text()


def examine(path: Path, spec: Any, seed: int, fixed: bool) -> dict[str, Any]:
    import sonde

    run = sonde.open(path)
    began = time.perf_counter()
    findings = run.findings()
    named = [f for f in findings if f.severity >= "warning"]
    broken = [w for w in run.warnings if w.startswith("the rule ")]
    labels = set() if fixed else set(spec.labels) - {"healthy"}
    return {
        "id": spec.id,
        "detected_at": first_named(run, labels),
        "seed": seed,
        "twin": fixed,
        "labels": ["healthy"] if fixed or not spec.labels else sorted(spec.labels),
        "also": [] if fixed else sorted(spec.also_ok),
        "pred": list(dict.fromkeys(f.rule for f in named)),
        "steps": {f.rule: f.step for f in reversed(named)},
        "sites": {f.rule: list(f.sites) for f in reversed(named)},
        "where": None if fixed else spec.where,
        "seconds": time.perf_counter() - began,
        "broken": broken,
    }


def first_named(run: Any, labels: set[str]) -> int | None:
    """The first step at which the rules name a root cause, given only the steps up to then."""
    from sonde.diagnose.check import check

    if not labels:
        return None
    window = run.window()
    last = window.last_step
    for step in sorted({*(min(round(20 * 1.25**k), last) for k in range(40)), last}):
        found = check(window.between(0, step), on_error=lambda *_: None)
        if any(f.rule in labels and f.severity >= "warning" for f in found):
            return int(step)
    return None


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    faulty = [r for r in rows if r["labels"] != ["healthy"]]
    healthy = [r for r in rows if r["labels"] == ["healthy"] and not r["twin"]]
    twins = [r for r in rows if r["twin"]]

    def share(rows: list[dict[str, Any]], is_true: Any) -> float:
        return sum(bool(is_true(r)) for r in rows) / max(len(rows), 1)

    diagnosis = share(faulty, lambda r: set(r["pred"]) & set(r["labels"]))
    good = sum(len(set(r["pred"]) & {*r["labels"], *r["also"]}) for r in faulty)
    bad = sum(len(set(r["pred"]) - {*r["labels"], *r["also"]}) for r in faulty) + sum(len(r["pred"]) for r in healthy)
    precision = good / max(good + bad, 1)
    placed = [r for r in faulty if r["where"] and set(r["pred"]) & set(r["labels"])]
    delays = sorted(r["detected_at"] for r in faulty if r["detected_at"] is not None)
    starts = [
        min(r["steps"][p] for p in r["pred"] if p in r["labels"]) for r in faulty if set(r["pred"]) & set(r["labels"])
    ]
    return {
        "faulty": len(faulty),
        "healthy": len(healthy),
        "twins": len(twins),
        "detection": share(faulty, lambda r: r["pred"]),
        "diagnosis": diagnosis,
        "false_alarms": share(healthy, lambda r: r["pred"]),
        "twin_alarms": share(twins, lambda r: r["pred"]),
        "label_precision": precision,
        "f1": 2 * precision * diagnosis / max(precision + diagnosis, 1e-9),
        "root_first": share(faulty, lambda r: r["pred"] and r["pred"][0] in r["labels"]),
        "place_named": share(placed, lambda r: any(r["where"] in s for p in r["pred"] for s in r["sites"].get(p, ())))
        if placed
        else None,
        "median_since_step": sorted(starts)[len(starts) // 2] if starts else None,
        "median_steps_to_detection": delays[len(delays) // 2] if delays else None,
        "per_label": _per_label(rows),
    }


def _per_label(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """For each label: the number of programs that have it, how often it was named, and how often wrongly."""
    table: dict[str, dict[str, int]] = defaultdict(lambda: {"programs": 0, "named": 0, "wrong": 0})
    for row in rows:
        for label in row["labels"]:
            if label != "healthy":
                table[label]["programs"] += 1
                table[label]["named"] += label in row["pred"]
        for label in row["pred"]:
            table[label]["wrong"] += label not in row["labels"] and label not in row["also"]
    return dict(sorted(table.items()))


def as_markdown(summary: dict[str, Any], made: dict[str, Any]) -> str:
    head = [
        "# How often the findings are right",
        "",
        f"Made by `benchmarks/diagnosis.py` on {made['date']}, commit `{made['commit']}`, seeds {made['seeds']}.",
        "The rules were tuned on these programs.",
        "",
        "| | |",
        "|---|---|",
        f"| programs | {summary['faulty']} faulty, {summary['healthy']} healthy, {summary['twins']} fixed twins |",
        *(
            f"| {key.replace('_', ' ')} | {summary[key]:.3f} |"
            for key in ("detection", "diagnosis", "false_alarms", "twin_alarms", "label_precision", "f1", "root_first")
        ),
        f"| steps until the root cause is named, median | {summary['median_steps_to_detection']} |",
        "",
        "| fault | programs | named | named wrongly |",
        "|---|---|---|---|",
    ]
    rows = [f"| {label} | {c['programs']} | {c['named']} | {c['wrong']} |" for label, c in summary["per_label"].items()]
    return "\n".join([*head, *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("ids", nargs="*", help="only programs whose id starts with one of these")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--variant", choices=VARIANTS, default="", help="only healthy programs, changed in this way")
    parser.add_argument("--traces", type=Path, default=None, help="folder where recorded runs are kept and reused")
    parser.add_argument("--out", type=Path, default=None, help="write JSON to this file, and a table next to it")
    parser.add_argument("-v", "--verbose", action="store_true", help="one line per program")
    options = parser.parse_args()

    core = _programs(options.folder)
    import torch

    torch.set_num_threads(1)
    import tempfile

    traces = options.traces or Path(tempfile.mkdtemp(prefix="sonde-diagnosis-"))
    rows = []
    for spec in core.REGISTRY.values():
        if options.ids and not any(spec.id.startswith(i) for i in options.ids):
            continue
        for seed in map(int, options.seeds.split(",")):
            for fixed in _states(spec, options.variant):
                path = record(spec, seed, fixed, traces, core, options.variant)
                rows.append(row := examine(path, spec, seed, fixed))
                if options.verbose or row["broken"]:
                    print(_line(row), flush=True)
    summary = summarize(rows)
    print(json.dumps({k: v for k, v in summary.items() if k != "per_label"}, indent=1))
    if options.out:
        report = {"made": _made(options), "summary": summary, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(as_markdown(summary, report["made"]))
    if options.traces is None:
        shutil.rmtree(traces)


def _made(options: argparse.Namespace) -> dict[str, Any]:
    import subprocess

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "programs": "own" if str(options.folder) == "own" else "shared",
        "seeds": options.seeds,
    }


def _states(spec: Any, variant: str) -> tuple[bool, ...]:
    """With the fault and without it; for a variant, only the healthy one."""
    is_healthy = not spec.labels or set(spec.labels) == {"healthy"}
    if variant:
        return (False,) if is_healthy else (True,) if spec.has_twin else ()
    return (False, True) if spec.has_twin else (False,)


def _programs(folder: Path) -> Any:
    """The module with REGISTRY, build, train and Observer."""
    if str(folder) in ("own", "trainers"):
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "programs"))
        program = importlib.import_module(f"{'faults' if str(folder) == 'own' else folder}.program")
        program.programs()
        return program
    sys.path.insert(0, str(folder.resolve()))
    import core

    import programs  # noqa: F401 - fills core.REGISTRY

    return core


def _line(row: dict[str, Any]) -> str:
    named = ",".join(row["pred"]) or "-"
    return (
        f"{_mark(row)} {row['id']:32s} {row['seed']} {'twin' if row['twin'] else '    '} {named} {row['broken'] or ''}"
    )


def _mark(row: dict[str, Any]) -> str:
    if row["labels"] == ["healthy"]:
        return "ok  " if not row["pred"] else "FALS"
    if not set(row["pred"]) & set(row["labels"]):
        return "MISS"
    return "ok  " if not set(row["pred"]) - {*row["labels"], *row["also"]} else "impr"


if __name__ == "__main__":
    main()
