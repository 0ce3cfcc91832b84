"""Writes benchmarks/results/foreign.md from the answers that `make foreign` has collected.

python tests/foreign/zoo_table.py FOLDER > benchmarks/results/foreign.md
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "transformers", "torchvision", "timm", "diffusers", "accelerate", "trl", "peft", "lightning", "keras",
    "tensorflow-cpu", "jax", "flax", "optax", "numpy",
)  # fmt: skip
HEAD = """\
# Foreign zoo

Models, trainers and loops that were not written for sonde, trained on synthetic data that they can learn: once
plainly, once with an independent float64 reference (`tests/foreign/oracle.py`), and once with sonde's defaults.

- **identical**: parameters, buffers, gradients, optimizer state, losses and the state of every random number
  generator are equal to the last bit with and without sonde.
- **values**: how many recorded values were compared with the reference, and how many series they belong to. All agree
  within the tolerances of `tests/foreign/tally.py`. Of the models, ten of the forty steps are compared value by
  value; at the other steps exactly the expected rows must have been recorded. Quantiles of tensors of more than 512
  elements are not compared, because they are computed from a sample.
- **warnings**: lines on stderr other than sonde's first and last, entries in `run.warnings`, and Python warnings that
  the training does not raise without sonde.
- **findings**: findings of severity warning or higher. Every entry is healthy, so each of them would be a false
  alarm. A finding marked "known" is expected, and its test fails as soon as it disappears.
"""


def main(folder: Path) -> str:
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    entries.sort(key=lambda entry: (entry["group"], entry["name"].lower()))
    parts = [HEAD, summary(entries)]
    for group in dict.fromkeys(entry["group"] for entry in entries):
        parts.append(section(group, [entry for entry in entries if entry["group"] == group]))
    parts.append(f"Made by `make foreign` on {datetime.now(UTC):%Y-%m-%d}. {surroundings()}")
    return "\n".join(parts) + "\n"


def summary(entries: list[dict[str, Any]]) -> str:
    right = sum(not entry["problems"] for entry in entries)
    values = sum((entry["values"] or {}).get("num_values", 0) for entry in entries)
    known = sum(len(entry["known_findings"]) for entry in entries)
    return f"{right} of {len(entries)} entries pass; {values:,} values compared; {known} known false alarms.\n"


def section(group: str, entries: list[dict[str, Any]]) -> str:
    lines = [
        f"## {group}",
        "",
        "| entry | steps | parameters | identical | values | warnings | findings |",
        "|---|---|---|---|---|---|---|",
        *map(row, entries),
        "",
    ]
    return "\n".join(lines)


def row(entry: dict[str, Any]) -> str:
    cells = [
        entry["name"],
        str(entry["num_steps"]),
        f"{entry['num_parameters']:,}",
        "yes" if not entry["not_identical"] else f"**no** ({len(entry['not_identical'])} differ)",
        values(entry["values"]),
        "none" if not entry["warnings"] else f"**{len(entry['warnings'])}**",
        findings(entry),
    ]
    return f"| {' | '.join(cells)} |"


def values(compared: dict[str, int] | None) -> str:
    if compared is None:
        return "not compared"
    text = f"{compared['num_values']:,} of {compared['num_series']:,} series"
    return f"{text}, **{compared['problems']} wrong**" if compared["problems"] else text


def findings(entry: dict[str, Any]) -> str:
    rules = dict.fromkeys(line.partition(":")[0] for line in entry["findings"])
    if not rules:
        return "none"
    return ", ".join(f"{rule} (known)" if rule in entry["known_findings"] else f"**{rule}**" for rule in rules)


def surroundings() -> str:
    sys.path.append(str(Path(sys.prefix) / "zoo"))  # where `make zoo` puts some of them
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, {', '.join(found)}; {platform.machine()}, one thread."


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1])))
