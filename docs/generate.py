"""Fill the tables in docs/ from the code:  python docs/generate.py. `tests/test_docs.py` fails if one is out of date.

Each table is between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a function in this file.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
_PLACE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(map(escape, row)) + " |" for row in rows]
    return "\n".join(lines)


def escape(cell: object) -> str:
    """The text of a cell, escaped for Markdown except inside backticks."""
    parts = str(cell).replace("|", "\\|").split("`")
    signs = str.maketrans({"<": "&lt;", ">": "&gt;", "*": "\\*"})
    return "`".join(part if i % 2 else part.translate(signs) for i, part in enumerate(parts))


def stats() -> str:
    from sonde.schema.stats import STATS

    rows = [(f"`{s.name}`", s.meaning, "yes" if s.needs_hist else "") for s in STATS.values()]
    return table(["stat", "meaning", "needs the histogram"], rows)


def joined() -> str:
    from sonde.schema.joined import JOINED

    rows = [
        (f"`{s.kind}/…/{s.name}`", s.meaning, ", ".join(f"`{kind}/…{suffix}`" for kind, suffix in s.partners))
        for s in JOINED.values()
    ]
    return table(["series", "meaning", "read together with"], rows)


def settings() -> str:
    return _settings_table(is_advanced=False)


def advanced_settings() -> str:
    return _settings_table(is_advanced=True)


def _settings_table(*, is_advanced: bool) -> str:
    from sonde.config import Settings, variable_of

    rows = [
        (f"`{row.name}`", f"`{_default(row.name)}`", f"`{variable_of(row.name)}`", row.meaning)
        for row in Settings.load().explain()
        if row.is_advanced == is_advanced
    ]
    return table(["setting", "default", "variable", "meaning"], rows)


def _default(name: str) -> object:
    from sonde.config import RecordSettings, Settings, WriterSettings

    group, _, inner = name.rpartition(".")
    default = {"": Settings, "writer": WriterSettings, "record": RecordSettings}[group].model_fields[inner].default
    return "none" if default is None else default


def old_settings() -> str:
    """Earlier names of settings and values."""
    from sonde.config import PREFIX
    from sonde.schema.old_names import SETTING_VALUES, SETTINGS

    rows = [(f"`{old}`, `{PREFIX}{old.upper()}`", f"`{new}`, `{PREFIX}{new.upper()}`") for old, new in SETTINGS.items()]
    for name, values in SETTING_VALUES.items():
        rows += [(f"`{name}={old}`", f"`{name}={new}`") for old, new in values.items()]
    return table(["earlier name", "name"], rows)


def old_stats() -> str:
    """Earlier names of stats and scalars."""
    from sonde.schema.old_names import INSPECTED_STATS, SCALARS, STATS

    rows = [(f"`{old}`", f"`{new}`") for old, new in STATS.items()]
    rows += [(f"`{kind}/…/{old}`", f"`{kind}/…/{new}`") for (kind, old), new in INSPECTED_STATS.items()]
    rows += [(f"`{old}`", f"`{new}`") for old, new in SCALARS.items()]
    return table(["earlier name", "name"], rows)


def fields() -> str:
    from sonde.schema.sketch import FIELDS

    return ", ".join(f"`{name}`" for name in FIELDS)


def stats_columns() -> str:
    from sonde.write.stats.parquet import STATS_SCHEMA

    return table(["column", "type"], [(f"`{field.name}`", f"`{field.type}`") for field in STATS_SCHEMA])


def scalars_columns() -> str:
    from sonde.write.stats.parquet import SCALARS_SCHEMA

    return table(["column", "type"], [(f"`{field.name}`", f"`{field.type}`") for field in SCALARS_SCHEMA])


def views() -> str:
    from sonde.read.series.views import STAT_COLUMNS, VIEWS

    rows = []
    for view in VIEWS.values():
        is_wide = view.name == "stats"
        names = [f"`{name}`" for name in view.columns if not is_wide or name not in STAT_COLUMNS]
        names += ["and one column for every [stat](stats.md)"] * is_wide
        rows.append((f"`{view.name}`", ", ".join(names)))
    return table(["table", "columns"], rows)


def rules() -> str:
    """Every rule: what it detects, its severity, the findings it explains, and its references."""
    from sonde.diagnose.check import all_rules

    rows = [
        (
            f"[{rule.name}](rules/{rule.name}.md)",
            rule.meaning.splitlines()[0],
            str(rule.severity),
            ", ".join(f"`{name}`" for name in rule.causes),
            "; ".join(rule.references),
        )
        for _, rule in sorted(all_rules().items())
    ]
    return f"{len(rows)} rules.\n\n" + table(["rule", "what is wrong", "severity", "explains", "references"], rows)


def flow_issues() -> str:
    """Every kind of gradient flow issue."""
    from sonde.show.flow.issue import MEANINGS

    return table(["issue", "what is wrong"], [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()])


def live_rules() -> str:
    """The cost of live rules during training, from the stored benchmark results."""
    path = DOCS.parent / "benchmarks" / "results" / "live-rules.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    result = report["result"]
    return (
        f"Measured by [`benchmarks/live_rules.py`](../benchmarks/live_rules.py), {report['date']}, with "
        f"{result['num_rules']} rules and {result['tensors_per_step']} tensors per step: {result['share']:.2%} of the "
        f"CPU time of training, {result['looks']} checks in {result['process_cpu_s']:.0f} s, "
        f"{result['column_mib']:.0f} MiB of columns."
    )


def overhead() -> str:
    """The main numbers of the overhead benchmark, from its stored results."""
    report = json.loads((DOCS.parent / "benchmarks" / "results" / "overhead.json").read_text(encoding="utf-8"))
    arms = report["models"]["gpt"]["arms"]

    def added(arm: str) -> str:
        low, high = (100 * (bound - 1) for bound in arms[arm]["cpu_interval"])
        return f"{100 * (arms[arm]['cpu_ratio'] - 1):+.1f} % ({low:+.1f} to {high:+.1f})"

    rows = [
        ("weights, gradients and updates at every step", added("sonde w+g+u")),
        ("the same and activations at every step", added("sonde w+g+u+a")),
        ("nothing: the A/A control", added("base again")),
        ('`wandb.watch(log="all", log_freq=1)`', added("wandb.watch")),
        ("TensorBoard histograms of weights and gradients", added("TensorBoard")),
    ]
    return table(["recorded for a small GPT, on a CPU", "added CPU time per step"], rows)


def diagnosis() -> str:
    """How often the findings are right, from the stored benchmark results."""
    results = DOCS.parent / "benchmarks" / "results"
    report = json.loads((results / "diagnosis.json").read_text(encoding="utf-8"))
    heads = [
        "programs",
        "runs",
        "root cause named",
        "root cause first",
        "precision",
        "false alarms, healthy",
        "false alarms, fixed",
    ]
    keys = ("diagnosis", "root first", "label precision", "false alarms, healthy", "false alarms, twins")
    rows = [
        (f"generated, {part}", _runs(of), *(_bounds(of[key]) for key in keys)) for part, of in _parts(report["scores"])
    ]
    shared = json.loads((results / "diagnosis-shared.json").read_text(encoding="utf-8"))["summary"]
    keys = ("diagnosis", "root_first", "label_precision", "false_alarms", "twin_alarms")
    rows.append(
        ("by others, seen while the rules were written", _runs(shared), *(f"{shared[key]:.2f}" for key in keys))
    )
    others = [
        (name, *(_bounds(of["held out"][key]) for key in ("diagnosis", "false alarms, healthy", "F1")))
        for name, of in [("sonde", report["scores"]), *report["published"].items()]
    ]
    compared = table(["held-out part", "root cause named", "false alarms, healthy", "F1"], others)
    words = f"The same programs under other rule sets, re-implemented with their published thresholds:\n\n{compared}"
    error = report["calibration"]["held out"]["expected calibration error"]
    sure = f"On the held-out part, the stated confidence is off by {error:.2f} on average (expected calibration error)."
    left = report["skipped"]["not recorded"]
    missing = f" {left} programs were not run for this report." if left else ""
    return f"{table(heads, rows)}\n\n{sure}{missing}\n\n{words}"


def _parts(scores: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(part, scores[part]) for part in ("development", "held out")]


def _runs(scores: dict[str, Any]) -> str:
    return f"{scores['faulty']} faulty, {scores['twins']} fixed, {scores['healthy']} healthy"


def _bounds(score: list[float]) -> str:
    return f"{score[0]:.2f} ({score[1]:.2f} to {score[2]:.2f})"


GPU_KERNELS = ("sketch, float32", "sketch, bfloat16", "optimizer pass, AdamW, float32")


def gpu() -> str:
    """The overhead of recording on a GPU, from the stored benchmark results."""
    report = json.loads((DOCS.parent / "benchmarks" / "results" / "gpu-speed.json").read_text(encoding="utf-8"))
    eager, compiled = (report[way]["0.9 B"]["arms"] for way in ("eager", "compiled"))
    rows = [
        (arm, f"{eager[arm]['ratio']:.3f}", f"{compiled[arm]['ratio']:.3f}" if arm in compiled else "")
        for arm in eager
        if arm != "off"
    ]
    kernels = report["kernels"]
    shares = ", ".join(f"{kernels['rows'][name]['of_the_limit']:.0%} ({name})" for name in GPU_KERNELS)
    words = (
        f"{report['gpu']}, torch {report['torch']}, {report['date']}. Fraction of the GPU's memory read speed, "
        f"with {kernels['tensors']} tensors: {shares}. [All results](../benchmarks/results/gpu-speed.md)."
    )
    heads = ["recorded at every step", "step time, eager", "step time, compiled"]
    return f"{table(heads, rows)}\n\n{words}"


def extras() -> str:
    from sonde.distribution import EXTRAS, extra_packages

    rows = [(f"`{name}`", EXTRAS[name], ", ".join(packages)) for name, packages in extra_packages().items()]
    return table(["extra", "adds", "packages"], rows)


def layers() -> str:
    """The rooms in the order in which they may import one another, as import-linter enforces it."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {contract["id"]: contract for contract in project["tool"]["importlinter"]["contracts"]}
    rows = [re.sub(r"[()]", "", layer) for layer in contracts["layers"]["layers"]]
    return "```text\n" + "\n".join(rows) + "\n```"


def catalog() -> str:
    from sonde.schema.layout import CATALOG_SCHEMA

    return f"```sql{CATALOG_SCHEMA.rstrip()}\n```"


def errors() -> str:
    import sonde.errors

    _, _, tree = (sonde.errors.__doc__ or "").partition("\n\n")
    return f"```text\n{tree.rstrip()}\n```"


def commands() -> str:
    """The help of the command and of every verb, as `--help` prints it."""
    from typer.testing import CliRunner

    from sonde.cli.main import VERBS, app

    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    runner = CliRunner()
    parts = []
    for verb in ("", *VERBS):
        text = runner.invoke(app, [*([verb] if verb else []), "--help"], prog_name="sonde").output
        lines = [line.rstrip() for line in text.strip().splitlines()]
        title = f"## sonde {verb}\n\n" if verb else ""
        parts.append(f"{title}```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join(parts)


GENERATORS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        stats,
        joined,
        settings,
        advanced_settings,
        old_settings,
        old_stats,
        fields,
        stats_columns,
        scalars_columns,
        views,
        rules,
        flow_issues,
        live_rules,
        overhead,
        diagnosis,
        gpu,
        extras,
        layers,
        catalog,
        errors,
        commands,
    )
}


def fill(text: str) -> str:
    """A page with its tables regenerated from the code."""
    return _PLACE.sub(lambda match: f"{match[1]}{GENERATORS[match[2]]()}\n{match[3]}", text)


def pages() -> list[Path]:
    """README.md and every page of docs/, without the pages of rules, which are generated as a whole."""
    written = [page for page in DOCS.rglob("*.md") if page.parent != DOCS / "rules"]
    return [DOCS.parent / "README.md", *sorted(written)]


def rule_pages() -> dict[Path, str]:
    """The page of each rule, as `sonde explain RULE` prints it."""
    from sonde.diagnose.check import all_rules
    from sonde.diagnose.page import page

    return {DOCS / "rules" / f"{name}.md": page(name) for name in sorted(all_rules())}


def main() -> None:
    known = rule_pages()
    for path in {*(DOCS / "rules").glob("*.md"), *known}:
        if path not in known:
            path.unlink()
        elif not path.exists() or path.read_text(encoding="utf-8") != known[path]:
            path.parent.mkdir(exist_ok=True)
            path.write_text(known[path], encoding="utf-8")
    for page in pages():
        old = page.read_text(encoding="utf-8")
        if (new := fill(old)) != old:
            page.write_text(new, encoding="utf-8")
            print(f"updated {page.name}")


if __name__ == "__main__":
    main()
