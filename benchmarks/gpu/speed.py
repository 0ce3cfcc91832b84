"""Measure every claim about speed on a GPU: kernels against the read limit, training with and without sonde.

    PYTHONPATH=src:vendor python benchmarks/gpu/speed.py --out results/        # about twelve minutes
    PYTHONPATH=src:vendor python benchmarks/gpu/speed.py --parts kernels,eager

Writes gpu-speed.json and gpu-speed.md; existing parts that are not measured now stay, with the commit they were
measured at. Ratios come from one run: arms take turns in short blocks of one process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from budget import budget
from in_graph import in_graph
from kernels import kernels
from report_gpu import as_markdown
from syncs import syncs
from training import FINITE_ARM, OTHERS, SLOW, SONDE_ARMS, end_to_end, print_table

FASTER = [arm for arm in OTHERS if arm != SLOW]
PARTS = ("kernels", "eager", "compiled", "small", "budget", "in_graph", "syncs")


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def part(name: str, rounds: int, block: int) -> Any:
    if name == "kernels":
        return kernels()
    if name == "eager":
        return {"0.9 B": end_to_end("0.9 B", False, rounds, block, [*SONDE_ARMS, FINITE_ARM, *FASTER])}
    if name == "compiled":
        return {"0.9 B": end_to_end("0.9 B", True, rounds, block, list(SONDE_ARMS))}
    if name == "small":
        return {
            "124 M eager": end_to_end("124 M", False, rounds, block, [*SONDE_ARMS, *OTHERS]),
            "124 M compiled": end_to_end("124 M", True, rounds, block, list(SONDE_ARMS)),
        }
    if name == "budget":
        return {"eager": budget(), "compiled": budget(compiled=True)}
    return in_graph() if name == "in_graph" else syncs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--block", type=int, default=4)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args()
    result: dict[str, Any] = {
        "command": f"python benchmarks/gpu/speed.py --rounds {options.rounds} --block {options.block}",
        "commits": {},
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    file = options.out / "gpu-speed.json" if options.out is not None else None
    if file is not None and file.is_file():
        before = json.loads(file.read_text())
        result = {**before, **result, "commits": before["commits"]}
    for name in options.parts.split(","):
        result["commits"][name] = commit()
        result[name] = part(name, options.rounds, options.block)
        torch.cuda.empty_cache()
        for title, table in result[name].items() if name in ("eager", "compiled", "small") else ():
            print_table(f"{name} {title}", table)
        if name in ("budget", "in_graph", "syncs"):
            print(json.dumps(result[name], indent=1), flush=True)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(result, indent=1) + "\n")
            file.with_suffix(".md").write_text(as_markdown(result))


if __name__ == "__main__":
    main()
