"""The page of a rule, as Markdown: written text next to the rule, and what its source declares.

`rules/NAME.md` has the sections that only a person can write; `examples/NAME.txt` is what `sonde diagnose` printed
about a real run (`docs/rule_examples.py`). Thresholds are the documented constants of `rules/NAME.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from sonde.diagnose.check import all_rules
from sonde.diagnose.confidence import origin_in_words
from sonde.diagnose.rule import Rule
from sonde.errors import UnknownNameError

SECTIONS: Final = (
    "What it looks like",
    "Why it happens",
    "How to fix it",
    "Thresholds",
    "When it is wrong",
    "How to mute it",
    "Related rules",
)
_HEAD: Final = re.compile(r"^## (.+)\n", re.MULTILINE)
_ORIGIN: Final = (
    "Constants of the rule's source. They were set so that programs with the fault are found, and healthy programs and "
    "the same programs with the fault fixed are not; [accuracy](../diagnose.md#accuracy) says how well that works."
)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that a rule compares with, and the reason for it."""

    name: str
    value: str
    meaning: str


def rule_named(name: str) -> Rule:
    """A rule, or an error with the closest name."""
    known = all_rules()
    if name not in known:
        raise UnknownNameError("rule", name, known)
    return known[name]


def page(name: str) -> str:
    """The whole page of a rule. Offline: nothing but the installed package is read."""
    rule, written = rule_named(name), _written(name)
    parts = {
        "What it looks like": example(name),
        "Why it happens": written["Why it happens"],
        "How to fix it": written["How to fix it"],
        "Thresholds": _thresholds(rule),
        "When it is wrong": written["When it is wrong"],
        "How to mute it": _mute(name),
        "Related rules": _related(rule),
    }
    head = f"# {name}\n\n{rule.meaning.splitlines()[0]}\n\n{_facts(rule)}\n"
    return head + "".join(f"\n## {title}\n\n{parts[title]}\n" for title in SECTIONS)


def example(name: str) -> str:
    """A finding of this rule as `sonde diagnose` printed it, or a sentence that none was recorded."""
    file = files("sonde.diagnose") / "examples" / f"{name}.txt"
    if not file.is_file():
        return "No run with this finding is part of our test programs yet; `sonde diagnose` prints it like any other."
    return f"```text\n{file.read_text(encoding='utf-8').rstrip()}\n```"


@cache
def thresholds(name: str) -> tuple[Threshold, ...]:
    """The numbers that a rule's source compares with, in the order of the source."""
    module = inspect.getmodule(rule_named(name).function)
    return tuple(_constants(inspect.getsource(module))) if module is not None else ()


def _constants(source: str) -> Iterator[Threshold]:
    body = ast.parse(source).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or node.value is None or not isinstance(node.target, ast.Name):
            continue
        text = ast.unparse(node.value)
        is_number = re.fullmatch(r"-?[\d.e+-]+|\(.*\)", text) is not None and any(c.isdigit() for c in text)
        if node.target.id.startswith("_") or not is_number:
            continue
        is_documented = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        )
        meaning = " ".join(str(after.value.value).split()) if is_documented else ""  # type: ignore[union-attr]
        yield Threshold(node.target.id, text, meaning)


def _written(name: str) -> dict[str, str]:
    text = (files("sonde.diagnose.rules") / f"{name}.md").read_text(encoding="utf-8")
    _, *parts = _HEAD.split(text)
    return {title: content.strip() for title, content in zip(parts[::2], parts[1::2], strict=True)}


def _facts(rule: Rule) -> str:
    needs = ", ".join(f"`{pattern}`" for pattern in rule.needs) or "the loss, inspections and facts of the run"
    return f"Severity: {rule.severity}. Reads: {needs}. Confidence: {origin_in_words(rule.name)}."


def _thresholds(rule: Rule) -> str:
    rows = [
        f"| `{one.name}` | {one.value} | {one.meaning.replace('|', chr(92) + '|')} |" for one in thresholds(rule.name)
    ]
    table = "\n".join(["| constant | value | meaning |", "|---|---|---|", *rows])
    sources = f"\n\nReferences: {'; '.join(rule.references)}." if rule.references else ""
    return f"{table}\n\n{_ORIGIN}{sources}" if rows else f"The rule has no thresholds.{sources}"


def _mute(name: str) -> str:
    return f"""In `sonde.yaml`, for all runs started or viewed in that folder:

```yaml
mute:
  - rule: {name}
    sites: ["encoder.*"]
    until: 2030-01-01
    reason: known, and harmless here
```

For one run, `sonde.watch(model, mute=["{name}"])`; for one command, `SONDE_MUTE={name} sonde diagnose latest`. Muted
findings are counted, and shown with `--all`."""


def _related(rule: Rule) -> str:
    causes = sorted(other.name for other in all_rules().values() if other.explains(rule))
    lines = []
    if causes:
        lines.append(f"Often a consequence of {_links(causes)}.")
    if rule.causes:
        lines.append(f"Explains {_links(rule.causes)}.")
    return "\n\n".join(lines) or "None: it neither explains another rule nor is explained by one."


def _links(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"[{name}]({name}.md)" for name in names)
