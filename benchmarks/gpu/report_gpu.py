"""The results of `speed.py` as Markdown tables."""

from __future__ import annotations

from typing import Any


def as_markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Overhead of recording on a GPU",
        "",
        f"Made by `{result['command']}`, last on {result['date']}: {result['gpu']}, torch {result['torch']},",
        f"triton {result['triton']}. By commit: {_commits(result['commits'])}.",
        "",
    ]
    if "kernels" in result:
        lines += _kernels(result["kernels"])
    for part in ("eager", "compiled", "small"):
        for title, table in result.get(part, {}).items():
            name = f"GPT of {title}" if part == "small" else f"GPT of {title}, {part}"
            lines += _training(name, table)
    if "budget" in result:
        for title, found in result["budget"].items():
            lines += _budget(title, found)
    if "in_graph" in result:
        lines += _in_graph(result["in_graph"])
    if "syncs" in result:
        lines += _syncs(result["syncs"])
    if result.get("notes"):
        lines += ["## Notes", "", *(f"- {note}" for note in result["notes"]), ""]
    return "\n".join(lines) + "\n"


def _commits(of_part: dict[str, str]) -> str:
    """Each commit with the parts measured at it."""
    parts: dict[str, list[str]] = {}
    for part, commit in of_part.items():
        parts.setdefault(commit, []).append(part.replace("_", "-"))
    return "; ".join(f"`{commit}`: {', '.join(names)}" for commit, names in parts.items())


def _kernels(table: dict[str, Any]) -> list[str]:
    lines = [
        "## Kernels",
        "",
        f"{table['tensors']} tensors, {table['elements'] / 1e6:.0f} M elements. The fastest kernel that only reads",
        f"and sums, in the same run: {table['read_limit_TB_s']:.2f} TB/s.",
        "",
        "| | GB | ms | of the read limit |",
        "|---|---|---|---|",
    ]
    for name, row in table["rows"].items():
        lines.append(f"| {name} | {row['gb']:.2f} | {row['ms']:.3f} | {row['of_the_limit']:.0%} |")
    return [*lines, ""]


def _training(title: str, table: dict[str, Any]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        f"{table['step_ms']:.1f} ms per step without sonde. Everything at every step: the median of",
        f"{table['rounds']} rounds with its 95 % interval; `off again` shows the noise of the machine.",
        "",
        "| | ratio | peak memory |",
        "|---|---|---|",
    ]
    for arm, row in table["arms"].items():
        lines.append(
            f"| {arm} | {row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f}) | {row['peak_growth']:+.2%} |"
        )
    return [*lines, ""]


def _budget(title: str, found: dict[str, Any]) -> list[str]:
    facts = found["facts"]
    return [
        f"## `budget=0.01`, 300 steps of the 0.9 B model, {title}, no free steps",
        "",
        f"Measured from outside: {found['mean'] - 1:+.2%} (median of blocks of 50 steps {found['ratio'] - 1:+.2%},",
        f"from {min(found['ratios']) - 1:+.2%} to {max(found['ratios']) - 1:+.2%}). By the run's own measurement:",
        f"{found['account']:.2%} for these steps, {facts['fraction']:.2%} ± {facts['uncertainty'] or 0:.2%} including",
        f"those before them, which compile kernels. Gradients of {found['gradient_sites']} tensors, at least every",
        f"{found['longest_gap']} steps.",
        "",
        *(f"- {message}" for message in found["events"]),
        "",
    ]


def _in_graph(found: dict[str, Any]) -> list[str]:
    lines = [
        '## `activations="in-graph"`, compiled GPT of 124 M in bfloat16 autocast',
        "",
        "| | ratio | peak memory | graphs | breaks | sites |",
        "|---|---|---|---|---|---|",
    ]
    for arm, row in found.items():
        lines.append(
            f"| {arm} | {row['ratio']:.3f} | {row['peak_growth']:+.1%} | {row['graphs']} | {row['graph_breaks']} "
            f"| {row.get('sites', '')} |"
        )
    return [*lines, ""]


def _syncs(found: dict[str, Any]) -> list[str]:
    lines = [f"## Waits in a profiler's trace of {found['steps']} steps", "", "| | without | with |", "|---|---|---|"]
    lines += [f"| {name} | {num} | {found['with'][name]} |" for name, num in found["without"].items()]
    return [*lines, ""]
