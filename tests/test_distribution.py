"""The package is called `sonde-ml` wherever it is installed, and its extras have one definition."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sonde
from sonde.distribution import DISTRIBUTION, EXTRAS, extra_packages

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Extras that `sonde doctor` does not list: empty, everything, and the tools for work on sonde itself.
UNLISTED = {"web", "all", "dev"}
TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "pyproject.toml", "hatch_build.py")
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "scripts", "web/src", ".github")
SUFFIXES = {".py", ".md", ".yml", ".sh", ".ts", ".svelte", ".toml", ".txt"}
BUILT = {"static", "__pycache__", "node_modules"}
WRONG_NAME = re.compile(r"""pip(?:\s|['"f])+install(?:\s|['"f]|-[\w-]+)*\bsonde\b(?!-ml)|\bsonde\[""")


def texts() -> Iterator[Path]:
    """Every text file that a person may read or run."""
    yield from (ROOT / name for name in TEXTS)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES and not BUILT.intersection(path.parts) and path != Path(__file__):
                yield path


def test_no_text_installs_the_other_package() -> None:
    wrong = [path.relative_to(ROOT) for path in texts() if WRONG_NAME.search(path.read_text("utf-8"))]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "$ pip install sonde",
        "pip install -U sonde",
        "pip install --force-reinstall --no-deps sonde",
        'pip install "\n            f"-U sonde',
        'pip "\n            "install -U sonde',
        "pip install 'sonde[web]'",
        "needs `sonde[mlflow]`",
    ],
)
def test_the_wrong_name_is_found(text: str) -> None:
    assert WRONG_NAME.search(text)
    assert not WRONG_NAME.search(re.sub(r"\bsonde\b", DISTRIBUTION, text))


def test_name_and_version_are_those_of_the_project() -> None:
    assert (DISTRIBUTION, sonde.__version__) == (PROJECT["name"], PROJECT["version"])


def test_changelog_has_a_section_for_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", PROJECT["version"]]


def test_every_extra_says_what_it_adds() -> None:
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"]) - UNLISTED


def test_the_extras_for_everything_name_every_extra() -> None:
    for name in ("all", "dev"):
        (listed,) = re.findall(rf"{DISTRIBUTION}\[(.*)\]", PROJECT["optional-dependencies"][name][0])
        assert sorted(listed.split(",")) == sorted(EXTRAS)


def test_the_dashboard_needs_no_extra() -> None:
    assert PROJECT["optional-dependencies"]["web"] == []


def test_packages_of_an_extra_are_read_from_the_installation() -> None:
    listed = {
        extra: [re.split(r"[<>=\[]", package)[0] for package in PROJECT["optional-dependencies"][extra]]
        for extra in EXTRAS
    }
    assert {extra: sorted(packages) for extra, packages in extra_packages().items()} == {
        extra: sorted(packages) for extra, packages in listed.items()
    }
