"""The documentation tells the truth: every Python block runs, every table is the code's, every command exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
# A block that readers see, or one in a comment that sets the stage for it.
BLOCK = re.compile(r"^(?:```|<!-- )(\w+)\n(.*?)^(?:```|-->)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(#[^)]*)?\)")


def load(name: str) -> ModuleType:
    """A script of docs/, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load("generate")
PAGES: list[Path] = GENERATOR.pages()
# Importing these frameworks alone takes seconds.
SLOW = {"hugging-face.md", "jax.md", "keras.md", "lightning.md"}
FOREIGN = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # the frameworks' own warnings
RUNNABLE = [pytest.param(page, marks=FOREIGN if page.name in SLOW else [], id=page.name) for page in PAGES]


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each block of a language."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        if match[1] == language:
            yield text.count("\n", 0, match.start(2)), match[2]


def commands(page: Path) -> list[str]:
    """The commands after a prompt in the console blocks."""
    lines = [line for _, block in blocks(page, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ").partition("  #")[0] for line in lines if line.startswith("$ ")]


@pytest.mark.parametrize("page", RUNNABLE)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SONDE_DIR", "SONDE_MODE", "SONDE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    import sonde

    namespace: dict[str, object] = {"__name__": page.stem}
    try:
        for line, block in blocks(page, "python"):
            exec(
                compile("\n" * line + block, str(page), "exec"), namespace
            )  # the file's own line numbers in a traceback
    finally:
        sonde.finish()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_what_the_code_says(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
    text = page.read_text(encoding="utf-8")
    assert GENERATOR.fill(text) == text, "out of date; run  python docs/generate.py"


def test_every_generated_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    missing = [name for name in GENERATOR.GENERATORS if f"<!-- generated: {name} -->" not in text]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [match[1] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    broken = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    import typer

    from sonde.cli.main import app, with_verb

    group = typer.main.get_command(app)
    for line in commands(page):
        words = shlex.split(line)
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        if words[0] != "sonde":
            continue
        verb, *rest = with_verb(words[1:])
        command = group.commands[verb]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        given = [] if verb == "run" else [word.partition("=")[0] for word in rest if word.startswith("-")]
        assert set(given) <= known, line


def test_figures_are_what_their_script_draws() -> None:
    drawn = load("figures").pictures()
    stale = [path.name for path, text in drawn.items() if not path.exists() or path.read_text("utf-8") != text]
    assert stale == [], "run  python docs/figures.py"
    assert set(drawn) == set((ROOT / "docs" / "pictures").glob("concept-*.svg"))


def test_public_names_are_all_documented() -> None:
    import sonde

    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    untold = [name for name in sonde.__all__ if not re.search(rf"\b{name}\b", text)]
    assert untold == []


def test_readme_fits_on_a_screen_and_says_how_to_start() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for needed in ("pip install", "make demo", "make test", "benchmarks/overhead.py"):
        assert needed in text
    seen = re.sub(r"<!--.*?-->\n", "", text, flags=re.DOTALL)
    assert len(seen.splitlines()) <= 68
