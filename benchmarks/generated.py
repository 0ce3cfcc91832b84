"""Score the rules on the generated programs: train them once, keep the recorded runs, and re-score those in minutes.

    python benchmarks/generated.py --traces DIR               train what is missing, then score the rules
    python benchmarks/generated.py --traces DIR --no-train    score only what is there
    python benchmarks/generated.py --traces DIR --misses      also list misses and false alarms of development
    python benchmarks/generated.py --traces DIR --out FILE    write FILE (JSON) and a table next to it

Programs come from `programs/`: architecture, task, optimizer, schedule, style of logging, fault and severity, chosen by
hashes. Whole architectures and tasks are held out (`programs/split.py`); their results are printed in aggregate only,
unless --reveal is given. A fault that did no harm for its seed, by the score on held-out data, has "no effect". A
program without a fault that did not learn is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import published
import scores
from programs.catalogue import by_id, programs
from programs.record import record_all, recorded
from scores import Row

warnings.filterwarnings("ignore")


@dataclass(frozen=True)
class Unit:
    """A run to score."""

    id: str
    kind: str
    run: Path


def chosen(traces: Path, ids: list[str]) -> tuple[list[Unit], dict[str, list[str]]]:
    """The runs that count, and the ids of those that do not, by reason."""
    units: list[Unit] = []
    skipped: dict[str, list[str]] = {
        "not recorded": [],
        "no effect": [],
        "twin did not learn": [],
        "healthy did not learn": [],
    }
    twins: set[str] = set()
    for program in programs():
        if ids and not any(program.id.startswith(i) for i in ids):
            continue
        own = recorded(traces, program.id)
        twin = recorded(traces, program.base) if program.fault else None
        if own is None or (program.fault and twin is None):
            skipped["not recorded"].append(program.id)
        elif program.fault is None:
            if scores.is_healthy(own.outcome):
                units.append(Unit(program.id, "healthy", own.run))
            else:
                skipped["healthy did not learn"].append(program.id)
        elif twin is None or not scores.is_healthy(twin.outcome):
            skipped["twin did not learn"].append(program.id)
        else:
            if program.base not in twins:
                twins.add(program.base)
                units.append(Unit(program.id, "twin", twin.run))
            if scores.had_effect(program.fault.outcome, own.outcome, twin.outcome):
                units.append(Unit(program.id, "faulty", own.run))
            else:
                skipped["no effect"].append(program.id)
    return units, skipped


def examine(work: tuple[Unit, bool, bool]) -> Row:
    """Run the rules over one recorded run."""
    import sonde
    from sonde.diagnose.diagnosis import all_required_series

    unit, with_others, with_steps = work
    program, run = by_id(unit.id), sonde.open(unit.run)
    diagnosis = run.diagnosis()
    loud = [f for f in diagnosis.findings if f.severity >= "warning"]
    roots = {f.rule: f for f in reversed(diagnosis.roots)}
    order = [f.rule for f in diagnosis.roots if roots[f.rule] is f]
    row = Row(
        id=program.id if unit.kind != "twin" else program.base,
        kind=unit.kind,
        labels=sorted(program.labels) if unit.kind == "faulty" else [],
        also=sorted(program.also_ok) if unit.kind == "faulty" else [],
        named=list(dict.fromkeys(f.rule for f in loud)),
        roots=order,
        confidence=[roots[rule].confidence for rule in order],
        fault=program.fault.name if program.fault else "healthy",
        architecture=program.architecture,
        task=program.task,
        optimizer=program.optimizer,
        style=program.style,
        held_out=program.held_out,
        level=program.level,
    )
    if with_others:
        window = run.window((*all_required_series(), *published.NEEDS))
        row.others = {name: sorted(_quietly(rules, window)) for name, rules in published.RULE_SETS.items()}
    if with_steps and row.is_diagnosed:
        row.named_at = _named_at(diagnosis.window, set(row.labels))
    return row


def _quietly(rules: Any, window: Any) -> set[str]:
    import numpy as np

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: set[str] = rules(window)
    return found


def _named_at(window: Any, labels: set[str]) -> int | None:
    """The first step at which the rules name a root cause, given only the steps up to then."""
    from sonde.diagnose.check import all_rules, check

    # Only the rules that may name it: what explains what does not change what is named.
    rules = [rule for name, rule in all_rules().items() if name in labels]
    last = window.last_step
    for step in sorted({*(min(round(10 * 1.5**k), last) for k in range(12)), last}):
        found = check(window.between(0, step), rules, on_error=lambda *_: None)
        if any(f.severity >= "warning" for f in found):
            return int(step)
    return None


def score(units: list[Unit], processes: int, *, others: bool, steps: bool) -> list[Row]:
    """The rows of all units, with a line of progress."""
    work = [(unit, others, steps and unit.kind == "faulty") for unit in units]
    rows: list[Row] = []
    began = time.monotonic()
    with ProcessPoolExecutor(processes) as pool:
        for row in pool.map(examine, work, chunksize=4):
            rows.append(row)
            left = (time.monotonic() - began) / len(rows) * (len(work) - len(rows))
            print(f"\rscored {len(rows)}/{len(work)}, {left / 60:.1f} min left ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def report(rows: list[Row], skipped: dict[str, list[str]], *, reveal: bool) -> dict[str, Any]:
    """Everything that is published. Held-out programs appear in aggregate only, unless revealed."""
    seen = [row for row in rows if not row.held_out]
    parts = {"development": seen, "held out": [row for row in rows if row.held_out], "all": rows}
    detail = rows if reveal else seen
    return {
        "scores": {name: scores.summarize(part) for name, part in parts.items()},
        "calibration": {name: scores.calibration(part) for name, part in parts.items()},
        "published": {
            name: {
                part: scores.summarize(scores.as_rule_set(rows_of, name))
                for part, rows_of in parts.items()
                if part != "all"
            }
            for name in published.RULE_SETS
            if any(row.others for row in rows)
        },
        "by style": {
            name: scores.grouped(part, lambda row: row.style) for name, part in parts.items() if name != "all"
        },
        "by fault": scores.grouped([row for row in detail if row.kind == "faulty"], lambda row: row.fault),
        "by architecture": scores.grouped(detail, lambda row: row.architecture),
        "by rule": scores.by_rule(detail),
        "misses": [_miss(row) for row in detail if row.kind == "faulty" and not row.is_root_first],
        "false alarms": [{"id": row.id, "named": row.named} for row in detail if row.kind != "faulty" and row.named],
        "skipped": {reason: len(ids) for reason, ids in skipped.items()},
        "no effect": sorted(skipped["no effect"]),
    }


def _miss(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "level": row.level,
        "style": row.style,
        "expected": row.labels,
        "named": row.named,
        "diagnosed": row.is_diagnosed,
    }


# -------------------------------------------------------------------------------------------------------------- showing


def _cell(value: Any) -> str:
    if not isinstance(value, tuple | list):
        return "" if value is None else str(value)
    middle, low, high = value
    return f"{middle:.3f} ({low:.2f} to {high:.2f})" if math.isfinite(middle) else ""


def as_markdown(made: dict[str, Any], found: dict[str, Any]) -> str:
    """The report as a page."""
    parts = found["scores"]
    lines = [
        "# How often the findings are right, on generated programs",
        "",
        f"Made by `{made['command']}` on {made['date']}, commit `{made['commit']}`.",
        "In brackets: 95 % intervals from a bootstrap over programs. Architectures and tasks of the held-out part were",
        "chosen by a hash of their names before any run; its programs are reported in aggregate only.",
        "",
        *_table(["", *parts], [[key, *(_cell(parts[p][key]) for p in parts)] for key in parts["all"]]),
        "",
        "Not scored: " + ", ".join(f"{num} {reason}" for reason, num in found["skipped"].items()) + ".",
    ]
    if found["published"]:
        keys = ("detection", "diagnosis", "false alarms, healthy", "false alarms, twins", "label precision", "F1")
        for part in ("development", "held out"):
            rows = [["sonde", *(_cell(parts[part][key]) for key in keys)]]
            rows += [[name, *(_cell(of[part][key]) for key in keys)] for name, of in found["published"].items()]
            lines += ["", f"## The same programs under published rule sets: {part}", "", *_table(["", *keys], rows)]
        lines += [
            "",
            "The rule sets are re-implemented with their published thresholds (`benchmarks/published.py`).",
        ]
    for part in ("development", "held out"):
        known = found["calibration"][part]
        rows = [
            [f"{r['from']:.1f} to {r['to']:.1f}", r["findings"], f"{r['stated']:.2f}", f"{r['right']:.2f}"]
            for r in known["table"]
        ]
        lines += [
            "", f"## Is the confidence right? {part}", "",
            *_table(["stated", "root findings", "mean stated", "right"], rows),
            "", f"Expected calibration error: {known['expected calibration error']:.3f}.",
        ]  # fmt: skip
    for title, groups in (
        ("style of logging, development", found["by style"]["development"]),
        ("style of logging, held out", found["by style"]["held out"]),
        ("fault, development", found["by fault"]),
        ("architecture, development", found["by architecture"]),
    ):
        rows = [[name, *(_number(g[key]) for key in g)] for name, g in groups.items()]
        heads = ["", "faulty", "diagnosis", "root first", "without fault", "false alarms"]
        lines += ["", f"## By {title}", "", *_table(heads, rows)]
    lines += ["", "## Misses of the development part", "", "Faulty programs whose root cause does not come first.", ""]
    lines += [f"- `{m['id']}`: {', '.join(m['named']) or 'nothing'}" for m in found["misses"]]
    lines += ["", "## False alarms of the development part", ""]
    lines += [f"- `{f['id']}`: {', '.join(f['named'])}" for f in found["false alarms"]]
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return (
        ""
        if isinstance(value, float) and math.isnan(value)
        else f"{value:.2f}"
        if isinstance(value, float)
        else str(value)
    )


def _table(heads: list[str], rows: list[list[Any]]) -> list[str]:
    head = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*head, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def show(found: dict[str, Any]) -> None:
    for key in found["scores"]["all"]:
        cells = (f"{_cell(part[key]):>24s}" for part in found["scores"].values())
        print(f"{key:26s}", *cells)
    print(f"{'':26s}", *(f"{name:>24s}" for name in found["scores"]))
    for name, known in found["calibration"].items():
        print(f"calibration error, {name}: {known['expected calibration error']:.3f}")
    print("skipped:", found["skipped"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="only programs whose id starts with one of these")
    parser.add_argument("--traces", type=Path, required=True, help="folder where recorded runs are kept and reused")
    parser.add_argument("--processes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--no-train", action="store_true", help="score only what is recorded")
    parser.add_argument("--no-steps", action="store_true", help="do not measure after how many steps a fault is named")
    parser.add_argument("--no-published", action="store_true", help="only our rules")
    parser.add_argument(
        "--misses", action="store_true", help="list the misses and false alarms of the development split"
    )
    parser.add_argument("--reveal", action="store_true", help="name held-out programs too")
    parser.add_argument("--out", type=Path, default=None, help="write JSON to this file, and a page next to it")
    options = parser.parse_args()
    if not options.no_train:
        record_all(options.traces, options.ids, options.processes)
    units, skipped = chosen(options.traces, options.ids)
    rows = score(units, options.processes, others=not options.no_published, steps=not options.no_steps)
    found = report(rows, skipped, reveal=options.reveal)
    show(found)
    if options.misses:
        for miss in found["misses"]:
            print("MISS", miss["id"], miss["level"], miss["style"], "->", ",".join(miss["named"]) or "-")
        for alarm in found["false alarms"]:
            print("FALSE", alarm["id"], "->", ",".join(alarm["named"]))
    if options.out:
        made = {
            "command": "python benchmarks/generated.py --traces DIR",
            "date": time.strftime("%Y-%m-%d"),
            "commit": _commit(),
        }
        kept = [asdict(row) for row in rows if options.reveal or not row.held_out]
        options.out.write_text(json.dumps({"made": made, **found, "rows": kept}, indent=1) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(as_markdown(made, found), encoding="utf-8")


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
