"""The import contracts hold, and each of them bites: a violation planted in a copy of the source is found and named."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sonde

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "sonde"
CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}

# contract -> files (relative to the package) with the line to add at their end. The first is the forbidden import.
VIOLATIONS: dict[str, list[dict[str, str]]] = {
    "layers": [
        {"schema/names.py": "import sonde.write.writer as _"},
        {"errors.py": "from sonde.schema import names as _"},
        {"config.py": "from sonde.read import __doc__ as _"},
        {"write/writer.py": "import sonde.reduce as _"},
        {"reduce/__init__.py": "import sonde.probe as _"},
        {"read/__init__.py": "import sonde.write as _"},
        {"probe/__init__.py": "import sonde.session as _"},
        {"session.py": "import sonde.run as _"},
        {"run.py": "import sonde.show as _"},
        {"show/__init__.py": "import sonde.cli as _"},
        {"show/flow/__init__.py": "import sonde.flow as _"},
        {"testing/planted.py": "import sonde.cli as _", "testing/__init__.py": ""},
        {"flow/__init__.py": "import sonde.compat as _"},
        {"compat/__init__.py": "import sonde.cli as _"},
        {"a_new_room.py": ""},
    ],
    "compat": [{"compat/tracer.py": "def planted():\n    from sonde.compat import paramlake"}],
    "adapters": [
        {"adapters/a.py": "from sonde.adapters.b import x", "adapters/b.py": "x = 1", "adapters/__init__.py": ""},
    ],
    "stores": [
        {
            "write/tensors/stores/a.py": "import sonde.write.tensors.stores.b as _",
            "write/tensors/stores/b.py": "",
            "write/tensors/stores/__init__.py": "",
        },
    ],
    "rules": [
        {
            "diagnose/rules/a.py": "import sonde.diagnose.rules.b as _",
            "diagnose/rules/b.py": "",
            "diagnose/rules/__init__.py": "",
            "diagnose/__init__.py": "",
        },
    ],
    "viewing-without-torch": [
        {"read/__init__.py": "import torch"},
        {"run.py": "def planted():\n    import torch"},
        {"show/term/sparkline.py": "from torch import nn"},
        {"cli/list.py": "import sonde.session as _"},
        {"config.py": "import jax"},
    ],
    "training-without-viewers": [
        {"session.py": "import duckdb"},
        {"write/__init__.py": "from rich.table import Table"},
        {"probe/__init__.py": "def planted():\n    import typer"},
        {"reduce/__init__.py": "import pandas"},
        {"config.py": "import starlette"},
    ],
    "only-the-folder-is-shared": [
        {"run.py": "import sonde.write as _"},
        {"show/__init__.py": "import sonde.probe.schedule as _"},
        {"cli/list.py": "import sonde.write as _"},
    ],
    "training-does-not-read": [{"session.py": "import sonde.read as _"}],
    "views-read-through-run": [
        {"show/web/answers/lines.py": "import sonde.read.run.state as _"},
        {"show/__init__.py": "from sonde.read.series.raw import read_raw"},
        {"cli/list.py": "def planted():\n    from sonde.read.run.folder import read_manifest"},
    ],
    "schema-is-pure": [{"schema/sketch.py": "import torch"}, {"schema/layout.py": "import sqlite3"}],
    "acyclic": [
        {"schema/sketch.py": "def planted():\n    from sonde.schema.stats import STATS"},
        {"read/run/state.py": "if TYPE_CHECKING:\n    import sonde.read.series.raw as _"},
        {"write/stats/log.py": "import sonde.write.recorder as _"},
        {"tune/methods/__init__.py": "import sonde.tune.train.wrapper as _"},
        {"session/recording.py": "if TYPE_CHECKING:\n    from sonde.session.session import Session"},
        {"session/model/unseen_steps.py": "def planted():\n    from sonde.session.model.watched import WatchedModel"},
    ],
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "300", "NO_COLOR": "1"}
    arguments = ["--no-logo", "--no-cache", "--config", str(folder / "pyproject.toml")]
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def plant(folder: Path, files: dict[str, str]) -> None:
    for name, line in files.items():
        path = folder / "src" / "sonde" / name
        if path.with_suffix("").is_dir():  # a room that is a file today may be a folder tomorrow
            path = path.with_suffix("") / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")


def test_the_package_keeps_every_contract(source_copy: Path) -> None:
    result = lint(source_copy)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in result.stdout


def test_every_contract_has_a_planted_violation() -> None:
    assert set(VIOLATIONS) == set(CONTRACTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contract", "files"),
    [
        pytest.param(contract, files, id=f"{contract}-{next(iter(files))}")
        for contract, cases in VIOLATIONS.items()
        for files in cases
    ],
)
def test_planted_violation_breaks_its_contract(contract: str, files: dict[str, str], source_copy: Path) -> None:
    plant(source_copy, files)
    result = lint(source_copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"{CONTRACTS[contract]} BROKEN" in result.stdout, result.stdout + result.stderr


def private_uses(path: Path) -> list[str]:
    """Places where a view reaches into a `Run`; import-linter sees imports only."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return [f"{path.name}:{number}" for number, line in lines if re.search(r"\brun\._[a-z]", line)]


def test_views_use_the_public_side_of_a_run() -> None:
    paths = [path for room in ("show", "cli") for path in (PACKAGE / room).rglob("*.py")]
    assert len(paths) > 50
    assert [hit for path in paths for hit in private_uses(path)] == []


def test_reaching_into_a_run_is_found(tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text("run.path\nself.run._state.damage = {}\n")
    assert private_uses(path) == ["planted.py:2"]


def top_level_imports(path: Path, module: str) -> Iterator[str]:
    """Imports of the lazy top level, by any spelling; import-linter cannot see through a module's `__getattr__`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found = False
        if isinstance(node, ast.Import):
            found = any(alias.name == "sonde" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            found = ".".join([*above, *([node.module] if node.module else [])]) == "sonde"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # `import sonde.x` binds `sonde` as well, and with it every lazy name.
            found = node.value.id == "sonde" and node.attr in sonde.__all__
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            argument = node.args[0]
            found = (
                called in ("import_module", "__import__")
                and isinstance(argument, ast.Constant)
                and str(argument.value).split(".")[0] == "sonde"
            )
        if found:
            yield f"{module}:{node.lineno}"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_the_lazy_top_level() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    assert len(paths) > 10
    assert [hit for path in paths for hit in top_level_imports(path, module_name(path, PACKAGE.parent))] == []


@pytest.mark.parametrize(
    "line",
    [
        "import sonde",
        "import sonde as s",
        "import os, sonde",
        "import sonde.config\nsonde.watch(model)",
        "from sonde import watch",
        "from sonde import *",
        "from .. import watch",
        "def f():\n    from sonde import open",
        "import importlib\nimportlib.import_module('sonde')",
        "import importlib\nimportlib.import_module('sonde.session')",
        "__import__('sonde')",
    ],
)
def test_checker_of_the_top_level_bites(line: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(line)
    assert list(top_level_imports(path, "sonde.room.planted"))


@pytest.mark.parametrize(
    "line",
    [
        "from sonde.config import Settings",
        "import sonde.config as config",
        "import sonde.config\nsonde.config.Settings()",
        "import sondelike",
        "from . import names",
        "import importlib\nimportlib.import_module('torch')",
    ],
)
def test_checker_of_the_top_level_lets_the_rest_pass(line: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(line)
    assert not list(top_level_imports(path, "sonde.room.planted"))
