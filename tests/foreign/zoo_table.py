"""Writes benchmarks/results/foreign.md from the answers and outcomes that `make foreign` has collected.

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

from outcomes import Outcome, read

PACKAGES = (
    "torch", "transformers", "torchvision", "timm", "diffusers", "accelerate", "trl", "peft", "lightning", "keras",
    "tensorflow-cpu", "jax", "flax", "optax", "numpy",
)  # fmt: skip
HEAD = """\
# Foreign zoo

Models, trainers and loops that were not written for sonde, trained on synthetic data that they can learn: once with an
independent float64 reference (`tests/foreign/oracle.py`), once with sonde's defaults, and the models and Keras also
once with neither. A test fails unless all four properties hold.

- **identical**: parameters, buffers, gradients, optimizer state, losses and the states of the random number generators
  are equal to the last bit with and without sonde. The number is how many tensors and numbers were compared. Where
  less than that was compared, the cell says what.
- **values**: how many recorded values were compared with the reference, and how many series they belong to. They must
  agree within the tolerances of `tests/foreign/tally.py`; JAX and TensorFlow round differently and have those of
  `tests/foreign/ledger.py`. Of the models, ten of the forty steps are compared value by value; at the other steps
  exactly the expected rows must have been recorded. Quantiles of tensors of more than 512 elements are not compared,
  because they are computed from a sample. Nor are the scalars that sonde computes for its rules (`attn/`, `data/`,
  `model/`, `unit/`). A kind that was recorded without being compared is named in the cell.
- **warnings**: lines on stderr other than sonde's first and last, entries in `run.warnings`, and Python warnings that
  the training does not raise without sonde.
- **findings**: findings of severity warning or higher. Every entry is healthy, so each of them would be a false
  alarm. A finding marked "known" is expected, and its test fails as soon as it disappears.
"""


def main(folder: Path) -> str:
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    entries.sort(key=lambda entry: (entry["group"], entry["name"].lower()))
    unanswered = without_answers(read(folder), entries)
    parts = [HEAD, summary(entries, unanswered)]
    if unanswered:
        parts.append(missing(unanswered))
    for group in dict.fromkeys(entry["group"] for entry in entries):
        parts.append(section(group, [entry for entry in entries if entry["group"] == group]))
    parts.append(f"Made on {datetime.now(UTC):%Y-%m-%d}; `make foreign` makes it again. {surroundings()}")
    return "\n".join(parts) + "\n"


def without_answers(outcomes: list[Outcome], entries: list[dict[str, Any]]) -> list[Outcome]:
    """Tests that did not pass, for a reason that is in no row of the table."""
    wrong = {entry["name"] for entry in entries if entry["problems"]}
    return [outcome for outcome in outcomes if outcome.outcome != "passed" and not wrong.intersection(outcome.entries)]


def summary(entries: list[dict[str, Any]], unanswered: list[Outcome]) -> str:
    right = sum(not entry["problems"] for entry in entries)
    values = sum((entry["values"] or {}).get("num_values", 0) for entry in entries)
    known = sum(len(entry["known_findings"]) for entry in entries)
    total = f"{right} of {len(entries)} entries pass; {values:,} values compared; {known} known false alarms"
    return f"{total}; {len(unanswered)} other tests failed, were skipped or did not run.\n"


def missing(unanswered: list[Outcome]) -> str:
    lines = ["## Not checked", "", "| test | outcome | reason |", "|---|---|---|"]
    lines += [f"| {cell(one.test)} | **{one.outcome}** | {cell(one.reason)} |" for one in unanswered]
    return "\n".join([*lines, ""])


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
        identical(entry),
        values(entry["values"]),
        "none" if not entry["warnings"] else f"**{len(entry['warnings'])}**",
        findings(entry),
    ]
    return f"| {' | '.join(map(cell, cells))} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def identical(entry: dict[str, Any]) -> str:
    if not entry["num_identical"]:
        return "not compared"
    of = f"{entry['num_identical']:,}{': ' if entry['identity_of'] else ''}{entry['identity_of']}"
    return f"**no** ({len(entry['not_identical'])} of {of})" if entry["not_identical"] else f"yes ({of})"


def values(compared: dict[str, Any] | None) -> str:
    if compared is None or not compared["num_values"]:
        return "not compared"
    of = f" of {compared['num_series']:,} series" if compared["num_series"] else ", scalars only"
    text = f"{compared['num_values']:,}{of}"
    if compared["not_compared"]:
        text += f", without {', '.join(compared['not_compared'])}"
    return f"{text}, **{compared['problems']} wrong**" if compared["problems"] else text


def findings(entry: dict[str, Any]) -> str:
    rules = dict.fromkeys(line.partition(":")[0] for line in entry["findings"])
    gone = [f"**{rule} (known) is gone**" for rule in entry["known_findings"] if rule not in rules]
    named = [f"{rule} (known)" if rule in entry["known_findings"] else f"**{rule}**" for rule in rules]
    return ", ".join(named + gone) or "none"


def surroundings() -> str:
    sys.path.append(str(Path(sys.prefix) / "zoo"))  # where `make zoo` puts some of them
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} not installed")
    return f"Python {platform.python_version()}, {', '.join(found)}; {platform.machine()}, one thread."


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1])))
