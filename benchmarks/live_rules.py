"""The cost of live rules during training, at 500 tensors per step:  python benchmarks/live_rules.py

Trains a small GPT that records at least 500 tensors in every step (weights, gradients, updates, both moments of Adam),
with all rules live in this process, and compares two clocks: the CPU time of the rules, and the CPU time of the whole
process. Neither depends on what else the machine does. Two things are reported separately: importing the rules,
which happens once, and the last check, which runs when training is over.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import sonde
from report import describe_machine
from small_gpt import SmallGPT, load_text, next_batch
from sonde.session.observers import rules as live
from sonde.session.observers import rules_process

RESULTS = Path(__file__).parent / "results"
LIMIT = 0.005


def train(seconds: float, folder: Path, num_layers: int) -> dict[str, Any]:
    """Train for the given number of seconds; return the CPU time of the rules and of the whole process."""
    torch.manual_seed(0)
    text, generator = load_text(), torch.Generator().manual_seed(0)
    model = SmallGPT(num_layers=num_layers, dim=128, num_heads=4, context=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    rules = _catch_rules()
    rules_process.Link = _no_process  # type: ignore[assignment,misc]
    with sonde.init(project="benchmark", dir=folder, verbose=False, budget=None) as session:
        session.watch(model, optimizer)
        end, before, num_steps = time.monotonic() + seconds, time.process_time(), 0
        while time.monotonic() < end:
            loss = model(*next_batch(text, batch=16, context=64, generator=generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss})
            num_steps += 1
        process_s, spent_s, num_looks = time.process_time() - before, rules[0].spent_s, rules[0].num_looks
    run = sonde.open(session.path)
    rows = sum(run.stats(f"{kind}/*/n", steps=num_steps - 1).num_rows for kind in ("param", "grad", "update", "optim"))
    return {
        "steps": num_steps,
        "tensors_per_step": rows,
        "series": len(run.window().series),
        "num_rules": run.diagnosis().num_rules,
        "looks": num_looks,
        "rules_cpu_s": spent_s,
        "process_cpu_s": process_s,
        "share": spent_s / process_s,
        "last_look_cpu_s": rules[0].spent_s - spent_s,
        "import_cpu_s": rules[0].import_s,
        "column_mib": rules[0].num_bytes / 2**20,
        "findings": [finding.rule for finding in run.findings() if finding.severity >= "warning"],
    }


def _catch_rules() -> list[live.LiveRules]:
    """A list that collects the live rules of every session started from now on."""
    made: list[live.LiveRules] = []
    begin = live.LiveRules.begin

    def caught(self: live.LiveRules, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    live.LiveRules.begin = caught  # type: ignore[method-assign]
    return made


def _no_process() -> None:
    """Keeps the rules in this process, where their clock can be read."""
    raise OSError


def handing_over_us(num_records: int = 20_000) -> float:
    """Microseconds to keep one record until the next check, which the clock above does not see."""
    from sonde.schema.records import StatsRecord
    from sonde.schema.sketch import empty_rows

    rules = live.LiveRules(lambda _: None)
    record = StatsRecord.without_hist(0, 0.0, np.arange(10, dtype=np.int32), empty_rows(10))
    rules._num_records = -num_records  # all of them early records, which are never skipped
    before = time.thread_time()
    for _ in range(num_records):
        rules.on_item(record)
        rules._waiting_bytes = 0
    return (time.thread_time() - before) / num_records * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = train(options.seconds, Path(folder), options.layers)
    result["handing_over_us_per_record"] = handing_over_us()
    report = {"command": f"live_rules.py --seconds {options.seconds:g}", **describe_machine(threads=options.threads)}
    report["result"] = result
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "live-rules.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    print(f"\n{result['share']:.3%} of the CPU time of training; the limit is {LIMIT:.1%}.")
    sys.exit(result["share"] > LIMIT)


if __name__ == "__main__":
    main()
