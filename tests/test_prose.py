"""Text for people has no words that an engineer would not say: messages, help, docs, comments, test names, front-end.

Strings of Python come from its syntax tree, so that names of variables do not count; of the tests, only their names,
docstrings and comments are read. Markdown is read outside code, and the sources of the front-end as a whole.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What not to write, as a pattern, and what to write instead.
WORDS = {
    r"told|tells? that": "recorded, reported, logged, warned, shown",
    r"beside": "next to, in addition to, alongside",
    r"behind": "after",
    r"go(?:es)? on": "continues, resumes",
    r"anew": "again, re-",
    r"nobody": "no one, or name the actor",
    r"(?:so|this) many": "N, at most N, the number of",
    r"is (?:none|no)": "is not a, invalid",
    r"(?:what|that) is not finite|numbers? any ?more": "non-finite, NaN or Inf",
    r"makers": "causes",
    r"graver?": "severe, minimum severity",
    r"goodbye|farewell|greet(?:s|ed|ing)?|suffer(?:s|ed|ing)?": "shutdown, final status, start, error",
    r"give or take": "±",
    r"looked at|a look": "checked, inspected, a check",
    r"of (?:its|their) own": "its own, separate",
    r"stands|stood": "is, has stopped improving",
    r"lives? on|l(?:ies|ie|ay) in": "depends on, is stored in",
    r"signs? of life": "heartbeat",
    r"cost of watching": "overhead",
}

# Uses that are correct English, as narrow patterns around the word.
ALLOWED = (
    r"there is (?:no|none)",
    r"is no (?:longer|better|closer)",
    r"(?-i:is None)",  # Python's None
    r"told (?:apart|to)",
    r"stands (?:out|in for)",
    r"(?:leave|leaves|left)(?: \w+){0,2} behind",
    r"(?:steps?|device|seconds|furthest) (?:is )?behind",  # lagging
    r"behind (?:the|its) (?:guard|data)|behind autograd's back",  # in space
    r"(?:server|array|parameter|scripts) behind",  # what carries something
)

_LISTED = re.compile(rf"\b(?:{'|'.join(f'({word})' for word in WORDS)})\b", re.IGNORECASE)
_ALLOWED = re.compile("|".join(rf"\b(?:{use})\b" for use in ALLOWED), re.IGNORECASE)
_FENCE = re.compile(r"^( *)(```+|~~~+).*?^ *\2 *$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(`+)(?!`).*?\1", re.DOTALL)
_LINE_START = re.compile(r"\s*\n\s*(?:(?://|\*|#+|>|-- )\s?)*")


def found(text: str) -> list[str]:
    """The listed words in a text that are not allowed there, each with its surroundings."""
    text = _LINE_START.sub(" ", text)
    allowed = [match.span() for match in _ALLOWED.finditer(text)]
    return [
        f"“{match[0]}” in “{text[max(0, match.start() - 40) : match.end() + 40].strip()}”: write {_advice(match)}"
        for match in _LISTED.finditer(text)
        if not any(start <= match.start() and match.end() <= end for start, end in allowed)
    ]


def _advice(match: re.Match[str]) -> str:
    return list(WORDS.values())[(match.lastindex or 0) - 1]


def strings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string of a Python source; an f-string is one text, with "{}" for its values."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            inside.update(id(part) for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment; comments on consecutive lines are one text."""
    first, last, text = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield first, text
                first, text = token.start[0], ""
            last, text = token.start[0], f"{text}\n{token.string}"
    yield first, text


def named(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the names of tests and fixtures, and of docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            line = getattr(node, "lineno", 1)
            yield line, ast.get_docstring(node) or ""
            if not isinstance(node, ast.Module):
                yield line, node.name.replace("_", " ")


def markdown(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every paragraph of a Markdown page, without code."""
    source = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), source)
    line = 1
    for paragraph in re.split(r"(?<=\n)\n", source):
        yield line, _INLINE.sub("``", paragraph)
        line += paragraph.count("\n") + 1


def whole(source: str) -> Iterator[tuple[int, str]]:
    yield 1, source


def notebook(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the cells of a notebook: Markdown, and the strings and comments of its code."""
    readers: dict[str, tuple[Reader, ...]] = {"markdown": (markdown,), "code": (strings, comments)}
    for cell in json.loads(source)["cells"]:
        for read in readers[cell["cell_type"]]:
            yield from read("".join(cell["source"]))


Reader = Callable[[str], Iterator[tuple[int, str]]]


def files(*patterns: str) -> list[Path]:
    kept = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return sorted(path for path in kept if not NOT_OURS.search(path.relative_to(ROOT).as_posix()))


NOT_OURS = re.compile(r"(?:^|/)(?:node_modules|__pycache__)/|show/web/static/|^tests/[\w/]+/data/")
"""Installed, built, and recorded by earlier versions."""


PYTHON = files("src/**/*.py", "examples/*.py", "benchmarks/**/*.py", "scripts/**/*.py", "docs/*.py", "hatch_build.py")
TESTS = [path for path in files("tests/**/*.py") if path != Path(__file__)]
PAGES = files("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md", "src/**/*.md")
NOTEBOOKS = files("examples/*.ipynb")
FRONT_END = files("web/index.html", "web/*.js", "web/src/**/*.*", "web/tests/*.*")
OTHER = files(
    "Makefile",
    "pyproject.toml",
    ".pre-commit-config.yaml",
    ".github/**/*.yml",
    "docs/*.toml",
    "docs/theme/*.*",
    "scripts/*.sh",
    "src/**/*.[ct]*",
    "tests/**/*.c",
)
NO_TEXT = re.compile(r"\.(?:json|png|svg|gz|xz|npz|h5|parquet|so|typed)$|/requirements\.txt$")
"""Files below a folder of sources that hold no text."""
READERS: dict[str, tuple[Reader, list[Path]]] = {
    "strings": (strings, PYTHON),
    "comments": (comments, PYTHON + TESTS),
    "tests": (named, TESTS),
    "pages": (markdown, PAGES),
    "notebooks": (notebook, NOTEBOOKS),
    "front-end": (whole, FRONT_END),
    "other files": (whole, OTHER),
}


@cache
def texts(kind: str) -> list[tuple[Path, int, str]]:
    """(file, line, text) of all texts of a kind."""
    read, paths = READERS[kind]
    assert paths
    return [(path, line, text) for path in paths for line, text in read(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("kind", READERS)
def test_text_has_no_listed_word(kind: str) -> None:
    wrong = [f"{path.relative_to(ROOT)}:{line}: {one}" for path, line, text in texts(kind) for one in found(text)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_file_with_text_is_read() -> None:
    read = {path for _, paths in READERS.values() for path in paths} | {Path(__file__)}
    every = files("src/**/*", "web/src/**/*", "docs/**/*", "examples/**/*", "benchmarks/**/*", "tests/**/*")
    assert [path for path in every if path not in read and not NO_TEXT.search(path.as_posix())] == []


@pytest.mark.parametrize(
    ("place", "planted"),
    [
        ("src/sonde/cli/list.py", '"No runs, and nobody knows why."'),
        ("src/sonde/session/data/loss.py", "# the loss stands still"),
        ("src/sonde/diagnose/rules/dead_relu.md", "Units that live on nothing."),
        ("src/sonde/diagnose/examples/dead_relu.txt", "the loss is no loss"),
        ("docs/quickstart.md", "Training goes on."),
        ("README.md", "It tells that something is wrong."),
        ("web/src/App.svelte", "<p>It was started anew.</p>"),
        ("web/src/lib/checks.ts", 'const words = "64 rules looked at it";'),
        ("examples/notebook.ipynb", ""),
    ],
)
def test_a_word_planted_in_a_file_is_found(place: str, planted: str) -> None:
    source = (ROOT / place).read_text(encoding="utf-8")
    if place.endswith(".ipynb"):
        content = json.loads(source)
        content["cells"].append({"cell_type": "markdown", "source": ["Nobody is told."]})
        source = json.dumps(content)
    (*_, read) = [read for read, paths in READERS.values() if ROOT / place in paths][: 2 if planted[:1] == "#" else 1]
    assert not any(found(text) for _, text in read((ROOT / place).read_text(encoding="utf-8")))
    assert any(found(text) for _, text in read(f"{source}\n{planted}\n"))


def test_every_exception_is_used() -> None:
    everything = "\n\n".join(_LINE_START.sub(" ", text) for kind in READERS for _, _, text in texts(kind))
    unused = [use for use in ALLOWED if not re.search(rf"\b(?:{use})\b", everything, re.IGNORECASE)]
    assert not unused


def test_docstring_does_not_open_with_a_relative_clause() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in PYTHON
        for line, text in named(path.read_text(encoding="utf-8"))
        if re.match(r"(?:What|Which|Who|Of|To be)\b", text)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


PLANTED = {
    "a string": (strings, 'raise ValueError("no run is told of")'),
    "a string in two parts": (strings, 'x = ("training goes "\n     "on")'),
    "an f-string": (strings, 'x = f"{name} is no {kind}"'),
    "a string inside an f-string": (strings, "x = f\"{'grave' if y else 'mild'}\""),
    "a docstring": (strings, 'def f():\n    """At most so\n    many runs."""'),
    "a keyword's value": (strings, 'x: Annotated[int, Option(help="Only this grave or graver")] = 1'),
    "a comment": (comments, "x = 1  # written anew"),
    "a comment of two lines": (comments, "# the folder lies\n# in the run"),
    "the name of a test": (named, "def test_what_nobody_reads() -> None: ..."),
    "the docstring of a test": (named, 'def test_it() -> None:\n    """Behind the step."""'),
    "a paragraph": (markdown, "# Runs\n\nA file stands\nin the folder.\n"),
    "a cell of a table": (markdown, "| a | b |\n|---|---|\n| x | give or take 2 |\n"),
    "text in Svelte": (whole, "<p>\n  66 rules looked\n  at it\n</p>"),
    "a string in TypeScript": (whole, 'throw new Error("ended without a goodbye")'),
}


@pytest.mark.parametrize("where", PLANTED)
def test_planted_word_is_found(where: str) -> None:
    read, source = PLANTED[where]
    assert sum(len(found(text)) for _, text in read(source)) >= 1


def test_each_word_is_found_once() -> None:
    for word in ("told", "beside", "behind", "goes on", "anew", "nobody", "so many", "is none", "is no run", "makers"):
        assert len(found(f"A sentence with {word} in it.")) == 1
    for word in ("that is not finite", "graver", "goodbye", "suffers", "give or take", "looked at", "of its own"):
        assert len(found(f"A sentence with {word} in it.")) == 1
    for word in ("stands", "stood still", "lives on", "lies in", "signs of life", "cost of watching"):
        assert len(found(f"A sentence with {word} in it.")) == 1


def test_names_and_code_are_not_text() -> None:
    assert not [text for _, text in strings("told = beside(anew)") if found(text)]
    page = "Use `anew`.\n\n```python\ntold = 1\n```\n\nThere is no such run. It is no longer there.\n"
    assert not [text for _, text in markdown(page) if found(text)]
