"""What the documentation and the examples import, and the modules they name, is public; old documented paths work."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import sonde

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "sonde",
    "sonde.compat",
    *(f"sonde.compat.{name}" for name in sonde.compat.__all__),
    "sonde.diagnose.rule",
    "sonde.errors",
    "sonde.flow",
    "sonde.run",
    "sonde.show",
    "sonde.testing",
    "sonde.tune",
    "sonde.write",
    "sonde.adapters",
    *(f"sonde.adapters.{name}" for name in sonde.adapters.__all__ if name.islower()),
)
ALIASES = {"sonde.jax": "sonde.adapters.jax"}
PAGES = sorted([ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name != "architecture.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
BLOCK = re.compile(r"^(?:```|<!-- )(?:python|py)\n(.*?)^(?:```|-->)$", re.MULTILINE | re.DOTALL)
DOTTED = re.compile(r"(?<![\w./-])sonde(?:\.[A-Za-z_]\w*)+")
NOT_PYTHON = ("sonde.yaml", "sonde.mirrors", "sonde.recorders", "sonde.rules", "sonde.stores", "sonde.views")
"""A file, and groups of entry points."""

MOVED = [
    "sonde.cli.train:EXAMPLE",
    "sonde.read.tensors.exports:open_export",
    "sonde.read.tensors.files.formats:open_tensors",
    "sonde.reduce.numpy:sketch",
    "sonde.schema.frameworks.layers:canonical",
    "sonde.schema.frameworks.layouts:layer_type",
    "sonde.schema.frameworks.match:match_models",
    "sonde.session.entry.trainer:TrainerMixin",
    "sonde.session.observers.mirror:Mirror",
    "sonde.show.report.source:gather",
    "sonde.tune.config:ModelConfig",
    "sonde.tune.config:load_config",
    "sonde.tune.train.data:generate",
    "sonde.write.tensors.store:open_store",
]
"""Where the documentation said that these names are, before they had a public place."""


def imports(code: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from sonde; the name is empty for `import sonde.x`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def code_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".py" else "\n".join(BLOCK.findall(text))


def is_public(module: str, name: str) -> bool:
    if module not in PUBLIC:
        return False
    return not name or name in import_module(module).__all__ or f"{module}.{name}" in PUBLIC


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: path.name)
def test_documented_imports_are_public(path: Path) -> None:
    ours = [(module, name) for module, name in imports(code_of(path)) if module.partition(".")[0] == "sonde"]
    assert [f"{module}: {name}" for module, name in ours if not is_public(module, name)] == []


def is_known(dotted: str) -> bool:
    """Whether a dotted name starts with a public module, followed by a name of its `__all__`."""
    for alias, module in ALIASES.items():
        dotted = re.sub(rf"^{re.escape(alias)}\b", module, dotted)
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if (module := ".".join(parts[:end])) in PUBLIC:
            return end == len(parts) or parts[end] in (*import_module(module).__all__, "__version__")
    return False


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_names_in_the_text_are_public(path: Path) -> None:
    named = set(DOTTED.findall(path.read_text(encoding="utf-8"))) - set(NOT_PYTHON)
    assert sorted(name for name in named if not is_known(name)) == []


def test_the_checks_find_what_is_private() -> None:
    assert list(imports("import sonde.read.run\nfrom sonde.flow import x")) == [
        ("sonde.read.run", ""),
        ("sonde.flow", "x"),
    ]
    assert not is_public("sonde.read", "open_export")
    assert not is_public("sonde.flow", "nothing")
    assert not is_known("sonde.reduce.numpy")
    assert is_known("sonde.flow.analyze")


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_exists(module: str) -> None:
    found = import_module(module)
    assert [name for name in found.__all__ if not hasattr(found, name)] == []
    assert set(found.__all__) <= set(dir(found))


@pytest.mark.parametrize("old", MOVED)
def test_paths_that_were_documented_still_work(old: str) -> None:
    module, _, name = old.partition(":")
    assert hasattr(import_module(module), name)


MODULES = """
import sys
import sonde
assert {name!r} in dir(sonde)
assert not any(name.startswith("sonde.") for name in sys.modules)
print(sonde.{name}.__name__)
"""


@pytest.mark.parametrize("name", ["adapters", "compat", "errors", "flow", "jax", "show", "testing", "tune"])
def test_public_modules_are_attributes_that_load_on_first_use(name: str) -> None:
    code = MODULES.format(name=name)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.strip() == ALIASES.get(f"sonde.{name}", f"sonde.{name}"), ended.stderr


@pytest.mark.parametrize("name", ["adapters", "show", "testing", "tune", "write"])
def test_unknown_attributes_of_a_public_module_name_the_known_ones(name: str) -> None:
    module = import_module(f"sonde.{name}")
    known = module.__all__[0]
    with pytest.raises(AttributeError, match=rf"no attribute '{known}s'\. Did you mean .{known}.\? Known: .*{known}"):
        getattr(module, f"{known}s")


def test_unknown_attributes_name_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'tunes'\. Did you mean .tune.\? Known: .*tune"):
        _ = sonde.tunes  # type: ignore[attr-defined]
