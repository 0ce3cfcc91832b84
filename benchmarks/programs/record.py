"""Train the generated programs under sonde and keep each run with its outcome; those already there are kept."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs.catalogue import by_id, programs

OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Recorded:
    """A recorded run: its folder, and how well the program learned."""

    run: Path
    outcome: dict[str, Any]


def recorded(traces: Path, name: str) -> Recorded | None:
    """The run of a program or a base; None if it was not trained."""
    path = traces / name / OUTCOME
    if not path.exists():
        return None
    outcome = json.loads(path.read_text(encoding="utf-8"))
    return None if "error" in outcome else Recorded(path.parent / outcome["run"], outcome)


def record_all(traces: Path, ids: Sequence[str] = (), processes: int = 1) -> None:
    """Train what is missing, in at most two processes, with a line of progress."""
    missing = [unit for unit in units(ids) if not (traces / unit[0] / OUTCOME).exists()]
    if not missing:
        return
    traces.mkdir(parents=True, exist_ok=True)
    began, num = time.monotonic(), len(missing)
    with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        for done, _ in enumerate(pool.map(record_one, [(traces, *unit) for unit in missing]), 1):
            left = (time.monotonic() - began) / done * (num - done)
            print(f"\rtrained {done}/{num}, {left / 60:.1f} min left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def units(ids: Sequence[str] = ()) -> Iterator[tuple[str, str, bool]]:
    """Every run to record: (folder, program, with the fault repaired). Programs with the same base share a twin."""
    seen: set[str] = set()
    for program in programs():
        if ids and not any(program.id.startswith(i) for i in ids):
            continue
        yield program.id, program.id, False
        if program.has_twin and program.base not in seen:
            seen.add(program.base)
            yield program.base, program.id, True


def record_one(unit: tuple[Path, str, str, bool]) -> None:
    from programs.loop import train

    traces, name, id, fixed = unit
    folder = traces / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        run, outcome = train(by_id(id).setup(fixed=fixed), folder)
        found = {"run": str(run.resolve().relative_to(folder.resolve())), **outcome.as_dict()}
    except Exception:  # a program that cannot run is counted, and the others continue
        found = {"error": traceback.format_exc()}
    (folder / OUTCOME).write_text(json.dumps(found), encoding="utf-8")


def _quiet() -> None:
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
