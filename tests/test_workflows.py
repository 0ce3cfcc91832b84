"""The workflows test what the project promises, and call only what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sonde.cli.doctor import OLDEST_TORCH

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def jobs(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text("utf-8"))["jobs"]
    return found


def versions(key: str) -> set[tuple[int, ...]]:
    entries = jobs("test.yml")["versions"]["strategy"]["matrix"]["include"]
    return {tuple(map(int, entry[key].split("."))) for entry in entries}


def test_every_supported_python_is_tested() -> None:
    classifiers = re.findall(r"Python :: (\d+)\.(\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.MULTILINE)
    assert versions("python") == {(int(major), int(minor)) for major, minor in classifiers}


def test_the_last_four_minor_versions_of_torch_are_tested() -> None:
    major, minor = OLDEST_TORCH
    assert versions("torch") == {(major, minor + i) for i in range(4)}
    (pinned,) = re.findall(r"^TORCH := (\d+)\.(\d+)", MAKEFILE, re.MULTILINE)
    assert tuple(map(int, pinned)) in versions("torch")
    text = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    assert f"today {major}.{minor} to {major}.{minor + 3}." in text


def test_one_wheel_per_platform_and_a_runner_for_each() -> None:
    wanted = {word.partition("-")[2] for word in PROJECT["tool"]["cibuildwheel"]["build"].split()}
    assert wanted == {"manylinux_x86_64", "manylinux_aarch64", "macosx_arm64"}
    assert len(jobs("wheels.yml")["platform"]["strategy"]["matrix"]["include"]) == len(wanted)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_commands_and_files_exist(workflow: Path) -> None:
    text = workflow.read_text("utf-8")
    for target in re.findall(r"\bmake ([a-z]+)", text):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target
    for name in re.findall(r"(?:scripts|\.ci)/[\w.]+", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_no_host_is_named_and_only_publishing_has_rights(workflow: Path) -> None:
    assert "://" not in workflow.read_text("utf-8")
    document = yaml.safe_load(workflow.read_text("utf-8"))
    assert document["permissions"] == {"contents": "read"}
    assert [name for name, job in document["jobs"].items() if "permissions" in job] in ([], ["publish"])
