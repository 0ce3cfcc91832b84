"""Every rule has a whole page, and what the page claims is so."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sonde.diagnose.check import all_rules
from sonde.diagnose.finding import Finding, Severity
from sonde.diagnose.page import SECTIONS, page, thresholds
from sonde.errors import UnknownNameError
from sonde.schema.mutes import parse_mutes

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((\w+\.md)\)")


@pytest.mark.parametrize("name", sorted(all_rules()))
def test_a_rule_has_a_whole_page(name: str) -> None:
    text = page(name)
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    assert tuple(parts[1::2]) == SECTIONS
    assert all(len(part.strip()) > 20 for part in parts[2::2])
    fix = parts[2 * SECTIONS.index("How to fix it") + 2]
    assert BLOCK.search(fix), "no code"
    assert len(text) < 9000


@pytest.mark.parametrize("name", sorted(all_rules()))
def test_every_block_of_a_page_is_valid(name: str) -> None:
    for language, block in BLOCK.findall(page(name)):
        if language == "python":
            ast.parse(block)
        elif language == "yaml":
            (mute,) = parse_mutes(yaml.safe_load(block)["mute"])
            assert mute.rule == name
        else:
            assert language in ("text", "console")


@pytest.mark.parametrize("name", sorted(all_rules()))
def test_an_example_shows_its_rule(name: str) -> None:
    (looks,) = re.findall(r"## What it looks like\n\n(.*?)\n\n## ", page(name), re.DOTALL)
    if looks.startswith("```"):
        assert re.match(rf"```text\n[✗!·] {name}  ", looks)


def test_thresholds_are_the_constants_of_the_source() -> None:
    known = {one.name: one for one in thresholds("dead_relu")}
    assert known["DEAD"].value == "0.5"
    assert known["DEAD"].meaning.startswith("Fraction of a layer's units.")
    from sonde.diagnose.rules import dead_relu

    assert float(known["GONE"].value) == dead_relu.GONE


def test_the_docs_have_these_pages_and_no_others() -> None:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = {path: path.read_text(encoding="utf-8") for path in (DOCS / "rules").glob("*.md")}
    assert written == generator.rule_pages(), "out of date; run  python docs/generate.py"
    for text in written.values():
        assert all((DOCS / "rules" / name).exists() for name in LINK.findall(text))


def test_every_finding_links_to_the_page_of_its_rule() -> None:
    found = Finding(rule="dead_relu", severity=Severity.INFO, confidence=1.0, step=0, last_step=0, message="")
    assert found.doc.endswith("/docs/rules/dead_relu.md")
    assert found.as_dict()["doc"] == found.doc


def test_an_unknown_rule_is_refused_with_the_closest_name() -> None:
    with pytest.raises(UnknownNameError, match="dead_relu"):
        page("dead_rleu")
